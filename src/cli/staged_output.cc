#include "cli/staged_output.h"

#include <unistd.h>

#include <filesystem>

#include "base/error.h"
#include "checkpoint/commit.h"

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
  old_ = old_folder(parent(target_), base_name(target_));
  const Stat old = storage_.stat(old_);
  leftover_ = there.exists && old.exists && (old.is_directory || there.is_directory);  // a file replaces a file at once
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

// Nobody knows what is durable after a failure, so what was there gets its name back.
void StagedOutput::sync_or(const std::function<void()>& undo) {
  try {
    storage_.sync_directory(parent(target_));
  } catch (const Error&) {
    try {
      undo();
    } catch (const Error&) {  // the first error is the one to tell
      published_ = true;
    }
    throw;
  }
}

std::string StagedOutput::discard(const std::string& path) {
  try {
    remove_tree(storage_, path);
    return "";
  } catch (const Error& e) {
    return str(target_, " is written, but what was there before can't be removed; remove ", path, " (", e.what(), ")");
  }
}

std::string StagedOutput::publish() {
  const Stat ours = storage_.stat(temporary_), there = storage_.stat(target_);
  if (ours.is_directory) storage_.sync_directory(temporary_);
  if (!there.exists) {
    storage_.rename(temporary_, target_);
    sync_or([&] { storage_.rename(target_, temporary_); });
    published_ = true;
    return "";
  }
  if (!ours.is_directory && !there.is_directory) {
    storage_.rename(temporary_, target_);  // a file replaces a file at once
    published_ = true;
    storage_.sync_directory(parent(target_));
    return leftover_ ? discard(old_) : "";
  }
  if (storage_.exchange(temporary_, target_)) {
    sync_or([&] { storage_.exchange(temporary_, target_); });
    published_ = true;
    const std::string left = discard(temporary_);  // it holds the old content now
    const std::string older = leftover_ ? discard(old_) : "";
    return left.empty() ? older : left;
  }
  if (storage_.stat(old_).exists && !leftover_)
    fail(ErrorKind::kInvalidArgument, old_, ": is in the way, and no verb left it there; move it elsewhere");
  remove_tree(storage_, old_);
  storage_.rename(target_, old_);
  try {
    storage_.rename(temporary_, target_);
  } catch (const Error&) {
    storage_.rename(old_, target_);
    throw;
  }
  sync_or([&] {
    storage_.rename(target_, temporary_);
    storage_.rename(old_, target_);
  });
  published_ = true;
  return discard(old_);
}

void StagedOutput::withdraw() noexcept {
  try {
    storage_.rename(target_, temporary_);
    published_ = false;
  } catch (const Error&) {  // the error that brought us here says more
  }
}

}  // namespace shardsmith::cli
