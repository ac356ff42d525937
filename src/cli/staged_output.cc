#include "cli/staged_output.h"

#include <unistd.h>

#include <filesystem>
#include <functional>

#include "base/error.h"

namespace shardsmith::cli {

std::string absolute_path(const std::string& path) {
  std::error_code error;
  auto result = std::filesystem::weakly_canonical(path, error);
  if (error) fail(ErrorKind::kIo, path, ": ", error.message());
  std::string text = result.lexically_normal().string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

void check_apart(const std::string& target, const std::vector<std::string>& sources) {
  const auto is_inside = [](const std::string& path, const std::string& folder) {
    return path == folder || path.rfind(folder == "/" ? folder : folder + "/", 0) == 0;
  };
  for (const std::string& source : sources) {
    if (target == source) fail(ErrorKind::kInvalidArgument, target, ": is both what is read and what is to be written");
    if (is_inside(source, target))
      fail(ErrorKind::kInvalidArgument, target, ": holds ", source, ", which is to be read");
    if (is_inside(target, source))
      fail(ErrorKind::kInvalidArgument, target, ": lies inside of ", source, ", which is to be read");
  }
}

StagedOutput::StagedOutput(Storage& storage, std::string target, bool overwrite)
    : storage_(storage), target_(std::move(target)) {
  if (base_name(target_).empty() || target_ == "/") fail(ErrorKind::kInvalidArgument, target_, ": can't be written to");
  const Stat there = storage_.stat(target_);
  const bool empty = there.is_directory && storage_.list(target_).empty();
  if (there.exists && !empty && !overwrite) {
    fail(ErrorKind::kInvalidArgument, target_, ": is there already", there.is_directory ? " and not empty" : "",
         " (--overwrite replaces it)");
  }
  storage_.make_directory(parent(target_));
  temporary_ = join(parent(target_), str(".", base_name(target_), ".tmp-", getpid()));
  remove_tree(storage_, temporary_);  // of a process that had our number and died
}

StagedOutput::~StagedOutput() {
  if (published_) return;
  try {
    remove_tree(storage_, temporary_);
  } catch (const Error&) {  // the error that brought us here says more
  }
}

void StagedOutput::make_folder() { storage_.make_directory(temporary_); }

void StagedOutput::publish() {
  const std::string folder = parent(target_);
  const Stat ours = storage_.stat(temporary_), there = storage_.stat(target_);
  if (ours.is_directory) storage_.sync_directory(temporary_);
  if (!there.exists || (!ours.is_directory && !there.is_directory)) {
    storage_.rename(temporary_, target_);  // a file replaces a file at once
    published_ = true;
    storage_.sync_directory(folder);
    return;
  }
  const auto sync_or = [&](const std::function<void()>& undo) {
    try {
      storage_.sync_directory(folder);
    } catch (const Error&) {
      undo();  // nobody knows what is durable, so what was there keeps its name
      throw;
    }
  };
  if (storage_.exchange(temporary_, target_)) {
    sync_or([&] { storage_.exchange(temporary_, target_); });
    return;  // the temporary name holds the old content now, which goes with it
  }
  const std::string old = join(folder, "." + base_name(target_) + ".old");
  remove_tree(storage_, old);
  storage_.rename(target_, old);
  try {
    storage_.rename(temporary_, target_);
  } catch (const Error&) {
    storage_.rename(old, target_);
    throw;
  }
  sync_or([&] {
    storage_.rename(target_, temporary_);
    storage_.rename(old, target_);
  });
  published_ = true;
  remove_tree(storage_, old);
  storage_.sync_directory(folder);
}

}  // namespace shardsmith::cli
