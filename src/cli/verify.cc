#include <iostream>

#include "base/error.h"
#include "checkpoint/commit.h"
#include "checkpoint/load.h"
#include "cli/command_line.h"
#include "cli/describe.h"
#include "cli/source.h"
#include "cli/verbs.h"
#include "cli/zip_check.h"
#include "storage/storage.h"

namespace shardsmith::cli {
namespace {

struct Result {
  std::string path, format;
  bool checksums = true;  // false: the format has none, only the structure was looked at
  uint64_t bytes = 0;     // that were checked, or whose structure was
  std::vector<std::string> damage;
};

// What `check` finds wrong by throwing is damage, too.
template <typename Check>
void collect(Result& result, Check check) {
  try {
    check();
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kCorrupt && e.kind() != ErrorKind::kMismatch) throw;
    result.damage.emplace_back(e.what());
  }
}

// Structure, coverage and sizes on one hand, every block's checksum on the other.
Result verify_checkpoint(Storage& storage, const std::string& folder, const Progress& progress) {
  Result result{folder, "partial"};
  collect(result, [&] {
    const Manifest manifest = read_manifest(storage, folder);
    for (const auto& file : manifest.files) result.bytes += file.size;
    result.damage = verify_partial(storage, folder, manifest, progress);
    if (result.damage.empty()) read_partial(storage, folder, manifest);
  });
  return result;
}

Result verify_path(Storage& storage, const std::string& path, const std::string& format, const Progress& progress) {
  if (format == "partial") return verify_checkpoint(storage, path, progress);
  Result result{path, format};
  collect(result, [&] {
    const Source source = open_source(storage, path);
    validate(source.index);
    size_t checked = 0;
    for (const auto& file : source.index.files) {
      result.bytes += file.size;
      if (!looks_like_zip(storage, file.path)) continue;
      ++checked;
      for (auto& line : check_zip(storage, file.path, progress)) result.damage.push_back(std::move(line));
    }
    result.checksums = checked > 0 && checked == source.index.files.size();
  });
  return result;
}

// All checkpoints of a folder, and the pointer.
std::vector<Result> verify_folder(Storage& storage, const std::string& path, const Progress& progress) {
  std::vector<Result> results;
  bool pointed = false;
  for (const auto& found : scan(storage, path)) {
    pointed = pointed || found.newest;
    if (found.complete) {
      results.push_back(verify_checkpoint(storage, found.folder, progress));
    } else {
      Result result{join(path, found.name), "partial"};
      result.damage.push_back(join(path, found.name) + ": incomplete: " + found.why_not);
      results.push_back(std::move(result));
    }
  }
  const std::string pointer = join(path, kNewestName);
  if (storage.stat(pointer).exists && !pointed) {
    Result result{pointer, "pointer"};
    const std::string name = read_newest(storage, path);
    result.damage.push_back(pointer +
                            (name.empty() ? ": holds no bare name" : ": names " + name + ", which is not there"));
    results.push_back(std::move(result));
  }
  return results;
}

Value result_value(const Result& result) {
  Value value;
  value.set("path", result.path);
  value.set("format", result.format);
  value.set("checksums", result.checksums);
  value.set("bytes", static_cast<int64_t>(result.bytes));
  value.set("sound", result.damage.empty());
  value.set("damage", to_value(result.damage));
  return value;
}

void print_result(const Result& result) {
  if (result.damage.empty()) {
    std::cout << printable(result.path) << ": " << green("sound") << ", " << result.format << ", "
              << human_bytes(result.bytes)
              << (result.checksums ? ", every checksum matches"
                                   : "; only the structure was checked, the format has no checksums")
              << "\n";
  }
  for (const auto& line : result.damage) std::cout << red("damaged: ") << printable(line) << "\n";
}

}  // namespace

int run_verify(const Arguments& arguments) {
  CommandLine line("verify",
                   "Checks a checkpoint or model: every checksum that it has, element coverage, sizes and pointers.\n"
                   "A folder of checkpoints: all of them. Exit code 4 where something is damaged.");
  std::string path;
  line.app().add_option("PATH", path, "A file, a checkpoint, a model folder or a folder of checkpoints")->required();
  if (!line.parse(arguments)) return 0;
  path = given_path(path);

  Storage& storage = local_storage();
  const Progress progress = line.output().progress();
  std::vector<Result> results;
  if (storage.stat(path).is_directory && holds_checkpoints(storage, path)) {
    results = verify_folder(storage, path, progress);
  } else {
    results.push_back(verify_path(storage, path, known_format(storage, path), progress));
  }

  bool sound = true;
  List list;
  for (const auto& result : results) {
    sound = sound && result.damage.empty();
    if (line.output().json) {
      list.push_back(result_value(result));
    } else {
      print_result(result);
    }
  }
  if (line.output().json) {
    Value object;
    object.set("path", path);
    object.set("sound", sound);
    object.set("checked", list);
    line.output().print(object);
  }
  return sound ? 0 : exit_code(ErrorKind::kMismatch);
}

}  // namespace shardsmith::cli
