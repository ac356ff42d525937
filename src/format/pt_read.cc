#include <map>
#include <tuple>
#include <unordered_map>

#include "base/error.h"
#include "format/pickle.h"
#include "format/pt.h"
#include "format/pt_record.h"
#include "format/zip.h"

namespace shardsmith {
namespace {

constexpr uint64_t kMaxPickle = 256 << 20, kMaxDeflatedPickle = 64 << 20;
constexpr uint64_t kMaxRecord = 256 << 20;
// The first bytes of torch's files before 1.6: a pickle of the number 0x1950a86a20f9469cfc6c.
constexpr std::string_view kLegacy("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 14);

std::string head(ReadFile& file) {
  std::string bytes(std::min<uint64_t>(file.size(), kLegacy.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

// A zip that torch wrote: every record's name begins with the first one's folder.
class Archive {
 public:
  explicit Archive(ReadFile& file) : file_(file) {
    const std::string first = head(file);
    if (first == kLegacy)
      fail(ErrorKind::kUnsupported, file.path(),
           ": written by torch before 1.6 (or with _use_new_zipfile_serialization=False); load it in torch and save it "
           "again");
    if (first.starts_with("PYTORCH1"))
      fail(ErrorKind::kUnsupported, file.path(), ": a preview format of torch that torch itself doesn't read any more");
    if (!first.starts_with("PK\x03\x04"))
      fail(ErrorKind::kCorrupt, file.path(), ": not a torch file: it doesn't begin like a zip archive");
    records_ = read_zip(file);
    if (records_.empty()) fail(ErrorKind::kCorrupt, file.path(), ": an empty zip archive");
    const size_t slash = records_[0].name.find('/');
    if (slash == std::string::npos)
      fail(ErrorKind::kCorrupt, file.path(), ": not a torch file: its records lie in no folder");
    prefix_ = records_[0].name.substr(0, slash + 1);
    for (const ZipRecord& record : records_) by_name_.emplace(record.name, &record);
  }

  const ZipRecord* find(const std::string& name) const {
    const auto found = by_name_.find(prefix_ + name);
    return found == by_name_.end() ? nullptr : found->second;
  }
  std::string read(const ZipRecord& record, uint64_t limit) const { return read_record(file_, record, limit); }
  // A small record's text without spaces around it; `otherwise` where there is none.
  std::string text(const std::string& name, const std::string& otherwise) const {
    const ZipRecord* record = find(name);
    if (!record) return otherwise;
    const std::string all = read(*record, 64);
    const size_t begin = all.find_first_not_of(" \r\n"), end = all.find_last_not_of(" \r\n");
    return begin == std::string::npos ? "" : all.substr(begin, end - begin + 1);
  }

 private:
  ReadFile& file_;
  std::vector<ZipRecord> records_;
  std::string prefix_;
  std::unordered_map<std::string_view, const ZipRecord*> by_name_;
};

void check_version(const Archive& archive, const std::string& path) {
  const std::string version = archive.text(".data/version", archive.text("version", "3"));
  const bool known = version == "10" || (version.size() == 1 && version[0] >= '1' && version[0] <= '9');
  if (!known)
    fail(ErrorKind::kUnsupported, path, ": torch's file version '", version.substr(0, 20), "', known are 1 to 10");
}

bool is_big_endian(const Archive& archive, const std::string& path) {
  const std::string order = archive.text("byteorder", "little");
  if (order != "little" && order != "big") fail(ErrorKind::kCorrupt, path, ": byte order '", order, "'");
  return order == "big";
}

// Gives each tensor in the value its path and its entry, in the order of appearance.
class Entries {
 public:
  Entries(const Pickled& pickled, std::vector<const ZipRecord*> records, const PtRecordContent& content, bool big,
          Index& index)
      : pickled_(pickled), records_(std::move(records)), big_(big), index_(index) {
    for (const PtSlice& slice : content.slices) {
      if (slice.tensor >= pickled.tensors.size() || !slices_.emplace(slice.tensor, &slice).second)
        fail(ErrorKind::kCorrupt, path(), ": record '", kPtRecordName, "': slice '", slice.name, "' of tensor ",
             slice.tensor, ", of which there is none or two");
    }
  }

  void walk(Value& value, const std::string& where) {
    if (TensorRef* tensor = value.get_if<TensorRef>()) {
      add(*tensor, where);
    } else if (List* list = value.get_if<List>()) {
      walk_items(*list, where);
    } else if (Tuple* tuple = value.get_if<Tuple>()) {
      walk_items(tuple->items, where);
    } else if (Set* set = value.get_if<Set>()) {
      walk_items(set->items, where);
    } else if (Opaque* object = value.get_if<Opaque>()) {
      walk_items(object->state, where);
    } else if (Dict* dict = value.get_if<Dict>()) {
      for (auto& [key, item] : dict->items) {
        walk(key, where);
        if (const std::string* name = key.get_if<std::string>())
          walk(item, path_join(where, *name));
        else if (const int64_t* number = key.get_if<int64_t>())
          walk(item, path_join(where, *number));
        else
          walk(item, path_join(where, to_json(key)));
      }
    }
  }

 private:
  using View = std::tuple<size_t, int64_t, Shape, Strides, Dtype>;

  const std::string& path() const { return index_.files[0].path; }

  void walk_items(List& items, const std::string& where) {
    for (size_t i = 0; i < items.size(); ++i) walk(items[i], path_join(where, static_cast<int64_t>(i)));
  }

  void add(TensorRef& reference, const std::string& where) {
    const PickledTensor& tensor = pickled_.tensors[reference.index];
    const auto found = slices_.find(reference.index);
    TensorEntry entry;
    entry.name = where.empty() ? "tensor" : where;
    entry.dtype = tensor.dtype;
    entry.shape = tensor.size;
    Slice slice;
    slice.box = whole(tensor.size);
    if (found != slices_.end()) {
      const PtSlice& listed = *found->second;
      bool fits = listed.box.extent.size() == tensor.size.size();
      // A local tensor may be larger than its box (padding), never smaller.
      for (size_t d = 0; fits && d < tensor.size.size(); ++d) fits = listed.box.extent[d] <= tensor.size[d];
      if (!fits)
        fail(ErrorKind::kCorrupt, path(), ": tensor '", listed.name, "' ", to_string(tensor.size),
             " is smaller than its slice ", to_string(listed.box));
      if (seen_.insert_or_assign(reference.index, 0).second) entry.name = listed.name;
      entry.shape = listed.shape;
      slice.box = listed.box;
    }
    reference.index = index_.tensors.size();
    if (volume(tensor.size) != 0) {
      const auto [view, is_new] =
          views_.emplace(View{tensor.storage, tensor.offset, tensor.size, tensor.strides, tensor.dtype}, entry.name);
      if (!is_new) {
        entry.alias_of = view->second;
        entry.shape = index_.tensors[numbers_[view->second]].shape;
        index_.tensors.push_back(std::move(entry));
        return;
      }
      numbers_[entry.name] = index_.tensors.size();
    }
    const ZipRecord& record = *records_[tensor.storage];
    const uint64_t inner = static_cast<uint64_t>(tensor.offset) * static_cast<uint64_t>(size_of(tensor.dtype));
    slice.strides = tensor.strides;
    slice.offset = record.data + inner;
    if (big_ && size_of(tensor.dtype) > 1) slice.encoding = Encoding::kByteSwapped;
    if (record.deflated) {
      if (slice.encoding == Encoding::kByteSwapped)
        fail(ErrorKind::kUnsupported, path(), ": tensor '", entry.name, "' is both big-endian and deflated");
      slice.encoding = Encoding::kDeflated;
      slice.offset = record.data;
      slice.stored = record.stored;
      slice.inner = inner;
    }
    entry.slices.push_back(std::move(slice));
    index_.tensors.push_back(std::move(entry));
  }

  const Pickled& pickled_;
  std::vector<const ZipRecord*> records_;  // of each storage
  bool big_;
  Index& index_;
  std::unordered_map<size_t, const PtSlice*> slices_;
  std::unordered_map<size_t, int> seen_;
  std::map<View, std::string> views_;  // the first name of each
  std::unordered_map<std::string, size_t> numbers_;
};

}  // namespace

bool is_pt(Storage& storage, const std::string& path) {
  if (storage.stat(path).is_directory) return false;
  const std::string first = head(*storage.open_read(path));
  return first.starts_with("PK\x03\x04") || first == kLegacy;
}

Index read_pt(Storage& storage, const std::string& path) {
  const auto file = storage.open_read(path);
  const Archive archive(*file);
  if (archive.find("constants.pkl"))
    fail(ErrorKind::kUnsupported, path,
         ": a TorchScript program, not a checkpoint; save the model's state_dict instead");
  const ZipRecord* pickle = archive.find("data.pkl");
  if (!pickle) fail(ErrorKind::kCorrupt, path, ": a zip archive, but not one of torch's: it has no record 'data.pkl'");
  check_version(archive, path);
  const bool big = is_big_endian(archive, path);

  PtRecordContent content;
  if (const ZipRecord* record = archive.find(kPtRecordName))
    content = parse_pt_record(archive.read(*record, kMaxRecord), *record, path);

  Pickled pickled;
  {
    const std::string bytes = archive.read(*pickle, pickle->deflated ? kMaxDeflatedPickle : kMaxPickle);
    pickled = read_pickle(bytes, path);
  }
  std::vector<const ZipRecord*> records;
  for (const PickledStorage& held : pickled.storages) {
    const ZipRecord* record = archive.find("data/" + held.key);
    if (!record)
      fail(ErrorKind::kCorrupt, path, ": record 'data/", held.key, "' is missing, though a tensor lies in it");
    if (record->size != held.bytes)
      fail(ErrorKind::kCorrupt, path, ": record 'data/", held.key, "' has ", record->size, " bytes instead of ",
           held.bytes);
    records.push_back(record);
  }

  Index index;
  index.format = "pt";
  index.files.push_back({path, file->size(), content.checksums});
  index.values = std::move(pickled.value);
  Entries(pickled, std::move(records), content, big, index).walk(index.values, "");
  index.values = untag(std::move(index.values));
  index.reindex();
  return index;
}

PtRecord read_pt_record(Storage& storage, const std::string& path) {
  const auto file = storage.open_read(path);
  const Archive archive(*file);
  PtRecord result;
  result.file_size = file->size();
  const ZipRecord* record = archive.find(kPtRecordName);
  if (!record) return result;
  const std::string bytes = archive.read(*record, kMaxRecord);
  PtRecordContent content = parse_pt_record(bytes, *record, path);
  result.present = true;
  result.digest = digest_of(bytes);
  result.extra = std::move(content.extra);
  result.checksums = std::move(content.checksums);
  return result;
}

}  // namespace shardsmith
