#include <iostream>
#include <iterator>
#include <map>
#include <optional>

#include "base/error.h"
#include "checkpoint/commit.h"
#include "checkpoint/load.h"
#include "checkpoint/verify.h"
#include "cli/command_line.h"
#include "cli/describe.h"
#include "cli/source.h"
#include "cli/values_check.h"
#include "cli/verbs.h"
#include "cli/zip_check.h"
#include "format/zip.h"
#include "storage/storage.h"

namespace shardsmith::cli {
namespace {

struct Result {
  std::string path, format;
  bool checksums = true;  // of every file
  uint64_t bytes = 0;     // that were checked, or whose structure was
  std::vector<std::string> damage;
  std::vector<std::string> unchecked;  // what the format gives no means to check
  std::optional<ValuesCheck> values;

  bool sound() const { return damage.empty(); }
  bool finite() const { return !values || values->not_finite.empty(); }
};

struct Options {
  bool values = false;
  StreamOptions stream;
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

void add_lines(std::vector<std::string>& to, std::vector<std::string> lines) {
  std::move(lines.begin(), lines.end(), std::back_inserter(to));
}

// Counts what several checks have done of all bytes.
class Counter {
 public:
  Counter(const Progress& progress, uint64_t total) : progress_(progress), total_(total) {}
  void operator()(uint64_t bytes) {
    done_ += bytes;
    if (progress_) progress_({"verify", done_, total_, "bytes"});
  }

 private:
  const Progress& progress_;
  uint64_t total_, done_ = 0;
};

// Structure, coverage and sizes on one hand, every block's checksum on the other.
Result verify_checkpoint(Storage& storage, const std::string& folder, const Options& options) {
  Result result{folder, "partial"};
  collect(result, [&] {
    const Manifest manifest = read_manifest(storage, folder);
    for (const auto& file : manifest.files) result.bytes += file.size;
    result.damage = verify_partial(storage, folder, manifest, {options.stream.threads, options.stream.progress});
  });
  return result;
}

// The checksums of file `number`, whatever it has of them. False where it has none.
bool check_sums(Storage& storage, const Index& index, uint32_t number,
                const std::map<std::string, std::vector<ZipRecord>>& items, ParallelReader& reader, Result& result,
                Counter& count) {
  const FileEntry& entry = index.files[number];
  const auto done = [&](uint64_t bytes) { count(bytes); };
  uint64_t covered = 0;
  if (entry.checksums) {  // ours: a checksum for each block; the zip's own ones serve for what is behind
    add_lines(result.damage, verify_blocks(storage, entry.path, *entry.checksums, &index, number, reader, done));
    covered = entry.checksums->covered;
  }
  const auto of_items = items.find(base_name(entry.path));
  if (of_items == items.end() && !looks_like_zip(storage, entry.path)) return covered > 0;
  const auto file = storage.open_read(entry.path, Access::kDirect);
  auto records = of_items == items.end() ? read_zip(*file) : of_items->second;
  std::erase_if(records, [&](const ZipRecord& record) { return record.data < covered; });
  ZipCheck check = check_records(*file, std::move(records), reader, done);
  add_lines(result.damage, std::move(check.damage));
  if (check.without_checksum > 0) {
    result.unchecked.push_back(
        str(entry.path, ": ", check.without_checksum, " of ", check.records, " records have no checksum"));
  }
  return true;
}

// Every tensor's elements once, inside of the files.
Result verify_source(Storage& storage, const std::string& path, const std::string& format, const Options& options) {
  Result result{path, format};
  collect(result, [&] {
    const Source source = open_source(storage, path);
    validate(source.index);
    for (const auto& file : source.index.files) result.bytes += file.size;
    Counter count(options.stream.progress, result.bytes);
    ParallelReader reader(options.stream.threads, kVerifyUnit);
    const auto items = format == "dcp" ? dcp_records(storage, path) : std::map<std::string, std::vector<ZipRecord>>{};
    size_t checked = 0;
    for (size_t i = 0; i < source.index.files.size(); ++i) {
      checked += check_sums(storage, source.index, static_cast<uint32_t>(i), items, reader, result, count);
    }
    result.checksums = checked > 0 && checked == source.index.files.size();
    if (checked == 0) {
      result.unchecked.push_back("the bytes of tensors: the format has no checksums");
    } else if (!result.checksums) {
      result.unchecked.push_back(
          str(source.index.files.size() - checked, " of ", source.index.files.size(), " files have no checksums"));
    }
  });
  return result;
}

Result verify_path(Storage& storage, const std::string& path, const std::string& format, const Options& options) {
  Result result =
      format == "partial" ? verify_checkpoint(storage, path, options) : verify_source(storage, path, format, options);
  if (options.values && result.sound()) {
    const Source source = open_source(storage, path);
    StreamOptions stream = options.stream;
    stream.check = false;  // has been done
    stream.what = "values";
    result.values = check_values(source.index, storage, stream);
  }
  return result;
}

// All checkpoints of a folder, and the pointer.
std::vector<Result> verify_folder(Storage& storage, const std::string& path, const Options& options) {
  std::vector<Result> results;
  bool pointed = false;
  for (const auto& found : scan(storage, path)) {
    pointed = pointed || found.newest;
    if (found.kind == CheckpointKind::kFull) {
      results.push_back(verify_path(storage, found.folder, "full", options));
    } else if (found.complete) {
      results.push_back(verify_path(storage, found.folder, known_format(storage, found.folder), options));
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

Value values_value(const ValuesCheck& check) {
  Value value;
  value.set("tensors", static_cast<int64_t>(check.tensors));
  value.set("elements", check.elements);
  List list;
  for (const auto& tensor : check.not_finite) {
    Value entry;
    entry.set("name", tensor.name);
    entry.set("dtype", std::string(to_string(tensor.dtype)));
    entry.set("shape", List(tensor.shape.begin(), tensor.shape.end()));
    entry.set("nan", tensor.found.nan);
    entry.set("inf", tensor.found.infinite);
    list.push_back(entry);
  }
  value.set("not_finite", list);
  return value;
}

Value result_value(const Result& result) {
  Value value;
  value.set("path", result.path);
  value.set("format", result.format);
  value.set("checksums", result.checksums);
  value.set("bytes", static_cast<int64_t>(result.bytes));
  value.set("sound", result.sound());
  value.set("damage", to_value(result.damage));
  value.set("unchecked", to_value(result.unchecked));
  if (result.values) value.set("values", values_value(*result.values));
  return value;
}

void print_values(const Result& result) {
  const ValuesCheck& check = *result.values;
  for (const auto& tensor : check.not_finite) {
    std::cout << red("not finite: ") << printable(result.path) << ": tensor '" << printable(tensor.name) << "' "
              << to_string(tensor.dtype) << " " << to_string(tensor.shape) << ": " << tensor.found.nan << " NaN, "
              << tensor.found.infinite << " Inf of " << volume(tensor.shape) << "\n";
  }
  std::cout << printable(result.path) << ": "
            << (check.not_finite.empty() ? green("finite") : str(check.not_finite.size(), " not finite")) << ", "
            << check.tensors << (check.tensors == 1 ? " tensor" : " tensors") << " of " << human_count(check.elements)
            << " floating-point elements\n";
}

void print_result(const Result& result) {
  if (result.sound()) {
    std::cout << printable(result.path) << ": " << green("sound") << ", " << result.format << ", "
              << human_bytes(result.bytes);
    if (result.checksums) {
      std::cout << ", every checksum matches";
    } else {
      std::cout << "; names, sizes and coverage were checked";
    }
    for (const auto& line : result.unchecked) std::cout << "; not checked: " << printable(line);
    std::cout << "\n";
  }
  for (const auto& line : result.damage) std::cout << red("damaged: ") << printable(line) << "\n";
  if (result.values) print_values(result);
}

}  // namespace

int run_verify(const Arguments& arguments) {
  CommandLine line(
      "verify",
      "Checks a checkpoint or model: every checksum that it has, element coverage, sizes and pointers, and\n"
      "says what its format gives no means to check. A folder of checkpoints: all of them. Exit code 4 where\n"
      "something is damaged.");
  std::string path, memory = "256MiB";
  Options options;
  auto& app = line.app();
  app.add_option("PATH", path, "A file, a checkpoint, a model folder or a folder of checkpoints")->required();
  app.add_flag("--values", options.values, "Also count NaN and Inf in each tensor; exit code 4 where there are any");
  app.add_option("--threads", options.stream.threads, "Threads that read and sum")->capture_default_str();
  app.add_option("--memory-limit", memory, "Memory for the values")->capture_default_str();
  if (!line.parse(arguments)) return 0;
  if (options.stream.threads < 1) {
    fail(ErrorKind::kInvalidArgument, "verify: --threads is ", options.stream.threads, ", it can be 1 or more");
  }
  options.stream.memory = parse_size(memory, "--memory-limit");
  options.stream.progress = line.output().progress();
  options.stream.notice = [&](std::string_view text) { line.output().notice(text); };
  Storage& storage = local_storage();
  path = existing_path(storage, path);

  std::vector<Result> results;
  if (storage.stat(path).is_directory && holds_checkpoints(storage, path)) {
    results = verify_folder(storage, path, options);
  } else {
    results.push_back(verify_path(storage, path, known_format(storage, path), options));
  }

  bool sound = true, finite = true;
  List list;
  for (const auto& result : results) {
    sound = sound && result.sound();
    finite = finite && result.finite();
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
    if (options.values) object.set("finite", finite);
    object.set("checked", list);
    line.output().print(object);
  }
  return sound && finite ? 0 : exit_code(ErrorKind::kMismatch);
}

}  // namespace shardsmith::cli
