#include "format/safetensors.h"

#include <algorithm>

#include "base/error.h"
#include "base/utf8.h"
#include "format/bytes.h"
#include "format/shards.h"
#include "format/stream_writer.h"
#include "storage/atomic_file.h"

namespace shardsmith {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000;
constexpr std::string_view kMetadata = "__metadata__";

struct Range {
  uint64_t begin, end;
  size_t tensor;
};

class Parser {
 public:
  Parser(const std::string& path, uint64_t data_begin, uint64_t file_size)
      : path_(path), data_begin_(data_begin), data_size_(file_size - data_begin) {}

  void parse(const Value& header, Index& index) {
    const Dict* dict = header.get_if<Dict>();
    if (!dict) bad("its header is no JSON object");
    index.values = Value(Dict{});
    for (const auto& [key, info] : dict->items) {
      const std::string& name = *key.get_if<std::string>();
      if (name == kMetadata)
        index.values = metadata(info);
      else
        index.tensors.push_back(tensor(name, info, index.tensors.size()));
    }
    check_cover(index);
    add_ties(index);
  }

 private:
  template <typename... Args>
  [[noreturn]] void bad(const Args&... why) const {
    fail(ErrorKind::kCorrupt, path_, ": ", why...);
  }

  Value metadata(const Value& info) const {
    if (info.is_none()) return Value(Dict{});
    const Dict* dict = info.get_if<Dict>();
    if (!dict) bad("its __metadata__ is no JSON object");
    for (const auto& [key, text] : dict->items)
      if (!text.get_if<std::string>()) bad("its __metadata__ '", *key.get_if<std::string>(), "' is no text");
    return info;
  }

  // save_model keeps one of several names of the same bytes and tells the others: {other name: kept name}.
  void add_ties(Index& index) const {
    index.reindex();
    std::vector<TensorEntry> ties;
    for (const auto& [key, text] : index.values.get_if<Dict>()->items) {
      const std::string& name = *key.get_if<std::string>();
      const TensorEntry* kept = index.find(*text.get_if<std::string>());
      if (name == "format" || !kept || index.find(name)) continue;
      TensorEntry tie;
      tie.name = name;
      tie.dtype = kept->dtype;
      tie.shape = kept->shape;
      tie.alias_of = kept->name;
      ties.push_back(std::move(tie));
    }
    for (TensorEntry& tie : ties) index.tensors.push_back(std::move(tie));
  }

  int64_t size(const Value& value, const std::string& name, const char* what) const {
    const int64_t* n = value.get_if<int64_t>();
    if (!n || *n < 0) bad("tensor '", name, "': its ", what, " holds something else than sizes");
    return *n;
  }
  const List& list(const Value& info, const std::string& name, const char* what) const {
    const Value* value = info.find(what);
    const List* items = value ? value->get_if<List>() : nullptr;
    if (!items) bad("tensor '", name, "': '", what, "' is missing or no list");
    return *items;
  }

  TensorEntry tensor(const std::string& name, const Value& info, size_t number) {
    TensorEntry entry;
    entry.name = name;
    const Value* word = info.find("dtype");
    const std::string* dtype = word ? word->get_if<std::string>() : nullptr;
    if (!dtype) bad("tensor '", name, "': 'dtype' is missing or no text");
    const auto known = dtype_from_safetensors(*dtype);
    if (!known)
      fail(ErrorKind::kUnsupported, path_, ": tensor '", name, "' has the dtype '", *dtype, "', which can't be held");
    entry.dtype = *known;
    for (const Value& n : list(info, name, "shape")) entry.shape.push_back(size(n, name, "shape"));
    if (entry.shape.size() > 64) bad("tensor '", name, "' has ", entry.shape.size(), " dimensions");

    uint64_t bytes = static_cast<uint64_t>(size_of(entry.dtype));
    bool overflow = false;
    for (int64_t n : entry.shape) overflow |= __builtin_mul_overflow(bytes, static_cast<uint64_t>(n), &bytes);
    const List& offsets = list(info, name, "data_offsets");
    if (offsets.size() != 2) bad("tensor '", name, "': 'data_offsets' has ", offsets.size(), " numbers instead of 2");
    const auto begin = static_cast<uint64_t>(size(offsets[0], name, "data_offsets"));
    const auto end = static_cast<uint64_t>(size(offsets[1], name, "data_offsets"));
    if (overflow || end < begin || end - begin != bytes)
      bad("tensor '", name, "' of ", *dtype, " ", to_string(entry.shape), " needs ",
          overflow ? "over 2^64" : str(bytes), " bytes, but its offsets are ", begin, " and ", end);
    if (end > data_size_)
      bad("truncated: tensor '", name, "' ends at byte ", data_begin_ + end, " of a file of ",
          data_begin_ + data_size_);
    ranges_.push_back({begin, end, number});
    Slice slice;
    slice.box = whole(entry.shape);
    slice.offset = data_begin_ + begin;
    slice.strides = contiguous_strides(entry.shape);
    entry.slices.push_back(std::move(slice));
    return entry;
  }

  void check_cover(const Index& index) {
    std::sort(ranges_.begin(), ranges_.end(),
              [](const Range& a, const Range& b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
    uint64_t at = 0;
    for (const Range& range : ranges_) {
      if (range.begin != at)
        bad("tensor '", index.tensors[range.tensor].name, "' begins at byte ", range.begin, " of the data instead of ",
            at, range.begin < at ? ": it overlaps another" : ": there is a hole before it");
      at = range.end;
    }
    if (at != data_size_) bad("has ", data_size_, " bytes of data, but its tensors take ", at);
  }

  const std::string& path_;
  uint64_t data_begin_, data_size_;
  std::vector<Range> ranges_;
};

std::string make_header(const std::vector<SafetensorsTensor>& tensors,
                        const std::vector<std::pair<std::string, std::string>>& metadata) {
  Dict header;
  if (!metadata.empty()) {
    Dict texts;
    for (const auto& [key, text] : metadata) texts.items.emplace_back(Value(key), Value(text));
    header.items.emplace_back(Value(std::string(kMetadata)), Value(std::move(texts)));
  }
  uint64_t at = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    List shape;
    for (int64_t n : tensor.shape) shape.emplace_back(n);
    Dict info;
    info.items.emplace_back(Value("dtype"), Value(std::string(safetensors_name(tensor.dtype))));
    info.items.emplace_back(Value("shape"), Value(std::move(shape)));
    info.items.emplace_back(Value("data_offsets"), Value(List{Value(static_cast<int64_t>(at)),
                                                              Value(static_cast<int64_t>(at + tensor.source.size))}));
    header.items.emplace_back(Value(tensor.name), Value(std::move(info)));
    at += tensor.source.size;
  }
  std::string text = to_json(Value(std::move(header)));
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

void check_tensors(const std::vector<SafetensorsTensor>& tensors, const std::string& path) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const SafetensorsTensor& tensor = tensors[i];
    if (safetensors_name(tensor.dtype).empty())
      fail(ErrorKind::kUnsupported, path, ": tensor '", tensor.name, "' is ", to_string(tensor.dtype),
           ", for which safetensors has no word; convert it first");
    if (static_cast<uint64_t>(volume(tensor.shape)) * static_cast<uint64_t>(size_of(tensor.dtype)) !=
        tensor.source.size)
      fail(ErrorKind::kInvalidArgument, path, ": tensor '", tensor.name, "' ", to_string(tensor.shape), " of ",
           to_string(tensor.dtype), " comes with ", tensor.source.size, " bytes");
    if (tensor.name == kMetadata || !is_utf8(tensor.name))
      fail(ErrorKind::kUnsupported, path, ": '", tensor.name, "' can't be a tensor's name in safetensors");
  }
}

}  // namespace

bool is_safetensors(Storage& storage, const std::string& path) {
  if (storage.stat(path).is_directory) return false;
  const auto file = storage.open_read(path);
  if (file->size() < 9) return false;
  std::string head(9, '\0');
  file->read(0, std::as_writable_bytes(std::span(head)));
  const uint64_t length = get_le<uint64_t>(head, 0);
  return head[8] == '{' && length >= 2 && length <= kMaxHeader;
}

Index read_safetensors(Storage& storage, const std::string& path) {
  const auto file = storage.open_read(path);
  if (file->size() < 8)
    fail(ErrorKind::kCorrupt, path, ": truncated: ", file->size(), " bytes are no safetensors file");
  std::string number(8, '\0');
  file->read(0, std::as_writable_bytes(std::span(number)));
  const uint64_t length = get_le<uint64_t>(number, 0);
  if (length > kMaxHeader)
    fail(ErrorKind::kCorrupt, path, ": a header of ", length, " bytes, more than the ", kMaxHeader,
         " that are allowed");
  if (length > file->size() - 8)
    fail(ErrorKind::kCorrupt, path, ": truncated: its header has ", length, " bytes, the file ", file->size());
  std::string text(length, '\0');
  file->read(8, std::as_writable_bytes(std::span(text)));
  if (text.empty() || text[0] != '{') fail(ErrorKind::kCorrupt, path, ": its header doesn't begin with '{'");

  Index index;
  index.format = "safetensors";
  index.files.push_back({path, file->size(), nullptr});
  const Value header = parse_json(text, path + ": header");
  Parser(path, 8 + length, file->size()).parse(header, index);
  index.reindex();
  return index;
}

namespace {

std::vector<std::string> folder_indices(Storage& storage, const std::string& directory) {
  std::vector<std::string> names;
  for (const std::string& name : storage.list(directory)) {
    if (name == "model.safetensors.index.json") return {name};
    if (name.ends_with(".safetensors.index.json")) names.push_back(name);
  }
  return names;
}

}  // namespace

bool is_safetensors_folder(Storage& storage, const std::string& directory) {
  return !folder_indices(storage, directory).empty();
}

Index read_safetensors_folder(Storage& storage, const std::string& directory) {
  const std::vector<std::string> names = folder_indices(storage, directory);
  if (names.empty())
    fail(ErrorKind::kNotFound, directory, ": no weights: it has no index (model.safetensors.index.json)");
  if (names.size() > 1)
    fail(ErrorKind::kInvalidArgument, directory, ": ", names.size(), " checkpoints in one folder: ", names[0], ", ",
         names[1], "; give each its own");
  Index index = read_shards(storage, directory, join(directory, names[0]));
  index.format = "safetensors";
  return index;
}

void write_safetensors(Storage& storage, const std::string& path, std::vector<SafetensorsTensor> tensors,
                       const std::vector<std::pair<std::string, std::string>>& metadata) {
  check_tensors(tensors, path);
  std::sort(tensors.begin(), tensors.end(), [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
    return a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name;
  });
  for (size_t i = 1; i < tensors.size(); ++i)
    if (tensors[i].name == tensors[i - 1].name)
      fail(ErrorKind::kInvalidArgument, path, ": tensor '", tensors[i].name, "' is there twice");
  const std::string header = make_header(tensors, metadata);
  if (header.size() > kMaxHeader)
    fail(ErrorKind::kUnsupported, path, ": a header of ", header.size(), " bytes, more than the ", kMaxHeader,
         " that are allowed; write several files");
  uint64_t size = 8 + header.size();
  for (const SafetensorsTensor& tensor : tensors) size += tensor.source.size;

  write_file_atomic(storage, path, Access::kDirect, size, [&](WriteFile& file) {
    StreamWriter out(file, size);
    std::string number;
    put_le<uint64_t>(number, header.size());
    out.append(number);
    out.append(header);
    for (const SafetensorsTensor& tensor : tensors) out.append(tensor.source);
    out.finish();
  });
}

}  // namespace shardsmith
