#include "cli/conversion.h"

#include <algorithm>

#include "base/error.h"
#include "checkpoint/full.h"
#include "checkpoint/verify.h"
#include "cli/output.h"
#include "cli/signals.h"
#include "cli/weights.h"
#include "cli/writers.h"
#include "family/infer.h"

namespace shardsmith::cli {
namespace {

// The program itself, its buffers for writing, and what an index of a usual size takes.
constexpr uint64_t kBesides = 48 << 20;

struct Target {
  const char* format;
  void (*write)(Job&);
};
constexpr Target kTargets[] = {
    {"pt", write_pt_target},     {"safetensors", write_safetensors_target},
    {"hf", write_hf_target},     {"partial", write_partial_target},
    {"full", write_full_target}, {"dcp", write_dcp_target},
};

void mark_weights(const Value& value, const Content& content, Dtype to, std::vector<Dtype>& dtypes) {
  const auto all = [&](const List& items) {
    for (const Value& item : items) mark_weights(item, content, to, dtypes);
  };
  if (const TensorRef* ref = value.get_if<TensorRef>()) {
    if (is_castable(content.index.tensors[ref->index].dtype)) dtypes[ref->index] = to;
  }
  if (const List* list = value.get_if<List>()) all(*list);
  if (const Tuple* tuple = value.get_if<Tuple>()) all(tuple->items);
  if (const Dict* dict = value.get_if<Dict>()) {
    for (const auto& [key, item] : dict->items) mark_weights(item, content, to, dtypes);
  }
}

std::vector<Dtype> dtypes_of(const Content& content, const Conversion& request) {
  std::vector<Dtype> dtypes;
  for (const TensorEntry& tensor : content.index.tensors) dtypes.push_back(tensor.dtype);
  if (!request.dtype) return dtypes;
  mark_weights(content.model, content, *request.dtype, dtypes);
  size_t lossy = 0;
  const TensorEntry* first = nullptr;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    const Dtype from = content.index.tensors[i].dtype;
    const bool loses = size_of(dtypes[i]) < size_of(from) || (size_of(dtypes[i]) == size_of(from) && dtypes[i] != from);
    if (loses && ++lossy == 1) first = &content.index.tensors[i];
  }
  if (first && request.notice)
    request.notice(str(lossy, lossy == 1 ? " tensor loses" : " tensors lose", " precision, the first is ", first->name,
                       ": ", to_string(first->dtype), " -> ", to_string(*request.dtype)));
  return dtypes;
}

// A deflated record is inflated up to the last byte that a tensor in it needs: a few bytes of a file may be a great
// many.
struct Inflated {
  uint64_t bytes = 0;
  std::string name;
};
Inflated largest_inflated(const Index& index) {
  Inflated largest;
  for (const TensorEntry& tensor : index.tensors) {
    for (const Slice& slice : tensor.slices) {
      if (slice.encoding != Encoding::kDeflated || volume(slice.box.extent) == 0) continue;
      uint64_t last = 1;
      for (size_t d = 0; d < slice.strides.size(); ++d)
        last += static_cast<uint64_t>((slice.box.extent[d] - 1) * slice.strides[d]);
      const uint64_t bytes = slice.inner + last * static_cast<uint64_t>(size_of(tensor.dtype));
      if (bytes > largest.bytes) largest = {bytes, tensor.name};
    }
  }
  return largest;
}

}  // namespace

bool is_castable(Dtype dtype) {
  return dtype == Dtype::kF16 || dtype == Dtype::kBF16 || dtype == Dtype::kF32 || dtype == Dtype::kF64;
}

const std::vector<std::string>& writable_formats() {
  static const std::vector<std::string> formats = [] {
    std::vector<std::string> words;
    for (const Target& target : kTargets) words.emplace_back(target.format);
    return words;
  }();
  return formats;
}

void Job::announce(uint64_t bytes, size_t files) {
  feed.total = bytes;
  result.bytes = bytes;
  result.files = files;
  const std::string folder = parent(request.to);
  storage.make_directory(folder);
  const uint64_t available = storage.free_bytes(folder);
  if (available < bytes)
    fail(ErrorKind::kNoSpace, request.to, ": needs ", human_bytes(bytes), ", ", human_bytes(available), " are free");
  if (request.notice)
    request.notice(str("writing ", human_bytes(bytes), " to ", request.to, " (", request.format, ", ", files,
                       files == 1 ? " file" : " files", ") within ", human_bytes(request.memory_limit), " of memory"));
}

void Job::finish() {
  result.bytes_read = feed.memory.bytes_read() + feed.ledger.finish(storage);
  check_signals();
}

void Job::publish(StagedOutput& out) {
  if (std::string left = out.publish(); !left.empty()) result.left_behind.push_back(std::move(left));
}

ConversionResult convert(Storage& storage, const Conversion& request) {
  const auto target = std::find_if(std::begin(kTargets), std::end(kTargets),
                                   [&](const Target& t) { return request.format == t.format; });
  if (target == std::end(kTargets)) {
    const std::string near = nearest(request.format, writable_formats());
    std::string words;
    for (const std::string& word : writable_formats()) words += (words.empty() ? "" : ", ") + word;
    fail(ErrorKind::kInvalidArgument, "no format '", request.format, "' to write; there are ", words,
         near.empty() ? std::string() : str("; did you mean '", near, "'?"));
  }
  if (request.memory_limit < kBesides + StreamMemory::kLeast)
    fail(ErrorKind::kNoSpace, "a memory limit of ", human_bytes(request.memory_limit), " is too little: at least ",
         human_bytes(kBesides + StreamMemory::kLeast), " are needed");

  ConversionResult result;
  Source source = open_source(storage, request.from);
  validate(source.index, false);  // what follows relies on it
  const Inflated inflated = largest_inflated(source.index);
  const uint64_t needed = kBesides + StreamMemory::kLeast + 2 * inflated.bytes;  // of this window, and of the next
  if (request.memory_limit < needed)
    fail(ErrorKind::kNoSpace, request.from, ": tensor '", inflated.name, "' lies in a deflated record, of which ",
         human_bytes(inflated.bytes), " must be inflated at once; with a memory limit of ", human_bytes(needed),
         " that can be done");
  result.from_format = source.format;
  result.format = request.format;
  result.manifest = source.manifest;
  std::vector<std::string> paths{absolute_path(request.from)};
  for (const FileEntry& file : source.index.files) paths.push_back(absolute_path(file.path));
  check_apart(request.to, paths);
  const std::string recovered = recover_output(storage, request.to);
  if (request.notice && !recovered.empty()) request.notice(recovered);

  const Value config = request.family.empty() ? request.config : infer_config(request.family, weights_of(source).index);
  ContentOptions options{request.names, request.weights_only, config, request.include, request.exclude};
  const Content content = content_of(storage, request.from, std::move(source), options);
  result.left_out = content.left_out;
  const std::vector<Dtype> dtypes = dtypes_of(content, request);
  StreamMemory memory(request.memory_limit - kBesides - 2 * inflated.bytes, request.threads);
  BlockLedger ledger(content.index.files, [&](uint32_t file, uint64_t begin, uint64_t end) {
    return tensors_in(content.index, file, begin, end);
  });
  Feed feed{content, dtypes, storage, memory, ledger, request.progress};
  Job job{storage, request, content, feed, result};
  target->write(job);
  return result;
}

}  // namespace shardsmith::cli
