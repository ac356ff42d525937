#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "base/error.h"
#include "format/dcp.h"
#include "format/dcp_hf.h"
#include "format/dcp_metadata.h"
#include "format/file_range.h"
#include "format/shards.h"
#include "format/torch_object.h"
#include "format/value_tree.h"

namespace shardsmith {
namespace {

constexpr uint64_t kMaxMetadata = 1 << 30;
constexpr uint64_t kMaxBytesItem = 256 << 20;
constexpr size_t kMaxOpen = 256;
constexpr const char* kMetadataName = ".metadata";

// The number in `__{rank}.metadata` or `__{rank}_{i}.distcp`; -1 for any other name.
int64_t rank_of(std::string_view name, std::string_view suffix) {
  if (!name.starts_with("__") || !name.ends_with(suffix)) return -1;
  name = name.substr(2, name.size() - 2 - suffix.size());
  if (suffix == ".distcp") name = name.substr(0, name.find('_'));
  if (name.empty() || name.size() > 9) return -1;
  int64_t rank = 0;
  for (char c : name) {
    if (c < '0' || c > '9') return -1;
    rank = 10 * rank + (c - '0');
  }
  return rank;
}

struct Folder {
  bool whole = false;          // `.metadata`
  std::set<int64_t> metadata;  // ranks that wrote their own
  std::set<int64_t> data;      // ranks of which there are data files
};

Folder look_into(Storage& storage, const std::string& directory) {
  Folder folder;
  for (const std::string& name : storage.list(directory)) {
    if (name == kMetadataName) folder.whole = !storage.stat(join(directory, name)).is_directory;
    if (const int64_t rank = rank_of(name, kMetadataName); rank >= 0) folder.metadata.insert(rank);
    if (const int64_t rank = rank_of(name, ".distcp"); rank >= 0) folder.data.insert(rank);
  }
  return folder;
}

std::vector<DcpEntry> read_metadata(Storage& storage, const std::string& path) {
  return parse_dcp_metadata(read_text(storage, path, kMaxMetadata), path);
}

bool same_path(const List& a, const List& b) { return Value(a) == Value(b); }

// Each rank has written its own metadata, about what it holds itself: the chunks are put together. Of what several
// ranks hold whole, the lowest one's counts, as it does in a save with collectives.
class Joined {
 public:
  Joined(Storage& storage, const std::string& directory, const Folder& folder) {
    std::string missing;
    const int64_t last = std::max(*folder.metadata.rbegin(), folder.data.empty() ? 0 : *folder.data.rbegin());
    size_t count = 0;
    for (int64_t rank = 0; rank <= last && count < 10; ++rank)
      if (!folder.metadata.contains(rank)) missing += str(count++ ? ", " : "", "__", rank, kMetadataName);
    if (count)
      fail(ErrorKind::kCorrupt, directory, ": a save that did not finish, or of which files are missing: ", missing);
    for (int64_t rank : folder.metadata) {
      const std::string path = join(directory, str("__", rank, kMetadataName));
      for (DcpEntry& entry : read_metadata(storage, path)) add(std::move(entry), path);
    }
  }

  std::vector<DcpEntry> take() { return std::move(entries_); }
  // Items under one key that are no tensors, of further ranks: equal, or nobody can say which counts.
  const std::vector<std::pair<size_t, DcpItem>>& twins() const { return twins_; }

 private:
  void add(DcpEntry entry, const std::string& path) {
    const auto [known, is_new] = numbers_.emplace(entry.key, entries_.size());
    if (is_new) {
      boxes_.emplace_back();
      for (const DcpChunk& chunk : entry.chunks) boxes_.back().insert(to_string(chunk.box));
      entries_.push_back(std::move(entry));
      return;
    }
    DcpEntry& ours = entries_[known->second];
    if (ours.is_tensor != entry.is_tensor || ours.dtype != entry.dtype || ours.shape != entry.shape ||
        !same_path(ours.path, entry.path))
      fail(ErrorKind::kCorrupt, path, ": '", entry.key, "' ", to_string(entry.shape),
           " is something else than what a lower rank calls so, ", to_string(ours.shape),
           "; each rank of this save has its own content");
    if (!entry.is_tensor) twins_.emplace_back(known->second, std::move(entry.item));
    for (DcpChunk& chunk : entry.chunks)
      if (boxes_[known->second].insert(to_string(chunk.box)).second) ours.chunks.push_back(std::move(chunk));
  }

  std::vector<DcpEntry> entries_;
  std::vector<std::set<std::string>> boxes_;
  std::unordered_map<std::string, size_t> numbers_;
  std::vector<std::pair<size_t, DcpItem>> twins_;
};

std::string flat_name(const DcpEntry& entry) {
  if (entry.path.empty()) return path_join("", entry.key);
  std::string name;
  for (const Value& element : entry.path) {
    const std::string* text = element.get_if<std::string>();
    name = text ? path_join(name, *text) : path_join(name, *element.get_if<int64_t>());
  }
  return name;
}

class Reader {
 public:
  Reader(Storage& storage, const std::string& directory) : storage_(storage), directory_(directory) {
    index_.format = "dcp";
  }

  Index read(const std::vector<DcpEntry>& entries, const std::vector<std::pair<size_t, DcpItem>>& twins) {
    open_files(entries, twins);
    ValueTree tree;
    for (const DcpEntry& entry : entries) {
      const std::string name = flat_name(entry);
      Value value = entry.is_tensor ? tensor(entry, name) : other(entry.key, entry.item, name);
      tree.add(entry.path.empty() ? List{Value(entry.key)} : entry.path, std::move(value), directory_);
    }
    index_.values = tree.take(entries.size() + 65536, directory_);
    for (const auto& [number, item] : twins) compare(entries[number], item);
    index_.reindex();
    validate(index_);
    return std::move(index_);
  }

 private:
  // All of them before anything is read, so that an error lists what is missing.
  void open_files(const std::vector<DcpEntry>& entries, const std::vector<std::pair<size_t, DcpItem>>& twins) {
    std::map<std::string, uint64_t> needed;  // file -> the last byte that an item needs
    const auto need = [&](const DcpItem& item) {
      if (item.file.empty()) return;
      uint64_t& end = needed[item.file];
      end = std::max(end, item.offset + item.length);
    };
    for (const DcpEntry& entry : entries) {
      if (!entry.is_tensor) need(entry.item);
      for (const DcpChunk& chunk : entry.chunks) need(chunk.item);
    }
    for (const auto& [number, item] : twins) need(item);
    std::string missing, cut;
    size_t missing_count = 0, cut_count = 0;
    for (const auto& [name, end] : needed) {
      check_file_name(storage_, directory_, directory_, name);
      const std::string path = join(directory_, name);
      if (!storage_.stat(path).exists) {
        if (missing_count++ < 20) missing += (missing.empty() ? "" : ", ") + name;
        continue;
      }
      const uint64_t size = storage_.open_read(path)->size();
      if (size < end && cut_count++ < 20)
        cut += str(cut.empty() ? "" : ", ", name, " (", size, " of at least ", end, " bytes)");
      numbers_[name] = static_cast<uint32_t>(index_.files.size());
      index_.files.push_back({path, size, nullptr});
    }
    files_.resize(index_.files.size());
    if (missing_count || cut_count)
      fail(ErrorKind::kCorrupt, directory_, ": ",
           missing_count ? str(missing_count, " of ", needed.size(), " data files are missing: ", missing) : "",
           missing_count && cut_count ? "; " : "", cut_count ? str(cut_count, " are truncated: ", cut) : "");
  }

  // There may be more files than a process may have open.
  ReadFile& file(uint32_t number) {
    if (!files_[number]) {
      if (open_ == kMaxOpen) {
        for (auto& open : files_) open.reset();
        open_ = 0;
      }
      files_[number] = storage_.open_read(index_.files[number].path);
      ++open_;
    }
    return *files_[number];
  }

  TorchObject object(const std::string& key, const DcpItem& item) {
    const uint32_t number = numbers_.at(item.file);
    FileRange range(file(number), item.offset, item.length,
                    str(index_.files[number].path, ": item '", key, "' at ", item.offset));
    return read_torch_object(range, item.offset);
  }

  Value tensor(const DcpEntry& entry, const std::string& name) {
    TensorEntry out;
    out.name = name;
    out.dtype = entry.dtype;
    out.shape = entry.shape;
    const Value reference(TensorRef{index_.tensors.size()});
    // Two names of one item (we write them for tensors that share their bytes).
    if (entry.chunks.size() == 1 && !entry.chunks[0].item.file.empty() && volume(entry.shape) != 0) {
      const DcpItem& item = entry.chunks[0].item;
      const auto [first, is_new] = whole_.emplace(std::make_pair(item.file, item.offset), index_.tensors.size());
      const TensorEntry* kept = is_new ? nullptr : &index_.tensors[first->second];
      if (kept && kept->dtype == out.dtype && kept->shape == out.shape) {
        out.alias_of = kept->name;
        index_.tensors.push_back(std::move(out));
        return reference;
      }
    }
    const bool empty = volume(entry.shape) == 0;
    for (const DcpChunk& chunk : entry.chunks) {
      if (chunk.item.file.empty() || (volume(chunk.box.extent) == 0 && (!empty || !out.slices.empty()))) continue;
      out.slices.push_back(slice(entry, chunk));
    }
    index_.tensors.push_back(std::move(out));
    return reference;
  }

  Slice slice(const DcpEntry& entry, const DcpChunk& chunk) {
    const TorchObject held = object(entry.key, chunk.item);
    const uint32_t number = numbers_.at(chunk.item.file);
    const auto bad = [&](const auto&... why) {
      fail(ErrorKind::kCorrupt, index_.files[number].path, ": tensor '", entry.key, "' ", to_string(entry.shape),
           ": its item at ", chunk.item.offset, " ", why...);
    };
    const TensorRef* reference = held.pickled.value.get_if<TensorRef>();
    if (!reference) bad("holds no tensor");
    const PickledTensor& tensor = held.pickled.tensors[reference->index];
    if (tensor.dtype != entry.dtype) bad("is ", to_string(tensor.dtype), " instead of ", to_string(entry.dtype));
    if (tensor.size != chunk.box.extent)
      bad("has the shape ", to_string(tensor.size), " instead of ", to_string(chunk.box.extent));
    const StoredBytes& bytes = held.storages[tensor.storage];
    const uint64_t inner = static_cast<uint64_t>(tensor.offset) * static_cast<uint64_t>(size_of(tensor.dtype));
    Slice slice;
    slice.box = chunk.box;
    slice.file = number;
    slice.offset = bytes.offset + inner;
    slice.strides = tensor.strides;
    if (held.big_endian && size_of(tensor.dtype) > 1) slice.encoding = Encoding::kByteSwapped;
    if (bytes.deflated) {
      if (slice.encoding == Encoding::kByteSwapped) bad("is both big-endian and deflated");
      slice.encoding = Encoding::kDeflated;
      slice.offset = bytes.offset;
      slice.stored = bytes.stored;
      slice.inner = inner;
    }
    return slice;
  }

  void check_size(const std::string& key, const DcpItem& item) const {
    if (item.length > kMaxBytesItem)
      fail(ErrorKind::kUnsupported, join(directory_, item.file), ": '", key, "' is no tensor, but has ", item.length,
           " bytes, more than the ", kMaxBytesItem, " that are read");
  }

  // Anything else than a tensor; tuples may hold some.
  Value other(const std::string& key, const DcpItem& item, const std::string& name) {
    check_size(key, item);
    return add_entries(object(key, item), name, numbers_.at(item.file), index_);
  }

  void compare(const DcpEntry& entry, const DcpItem& twin) {
    check_size(entry.key, twin);
    const Pickled ours = object(entry.key, entry.item).pickled, theirs = object(entry.key, twin).pickled;
    if (ours.value == theirs.value && ours.tensors.empty() && theirs.tensors.empty()) return;
    fail(ErrorKind::kUnsupported, directory_, ": '", entry.key, "' is not the same in ", entry.item.file, " and ",
         twin.file, "; in a save without collectives each rank has its own, of which only one could be kept");
  }

  Storage& storage_;
  const std::string& directory_;
  Index index_;
  std::vector<std::unique_ptr<ReadFile>> files_;  // of Index::files, those that are open
  size_t open_ = 0;
  std::unordered_map<std::string, uint32_t> numbers_;
  std::map<std::pair<std::string, uint64_t>, size_t> whole_;  // whole tensors by their item
};

}  // namespace

bool is_dcp(Storage& storage, const std::string& directory) {
  const Folder folder = look_into(storage, directory);
  if (!folder.metadata.empty() || !folder.data.empty()) return true;
  if (folder.whole) {  // a name that others may use too
    const auto file = storage.open_read(join(directory, kMetadataName));
    std::byte first{};
    if (file->size() > 0) file->read(0, {&first, 1});
    if (first == std::byte{0x80}) return true;
  }
  return is_dcp_hf(storage, directory);
}

Index read_dcp(Storage& storage, const std::string& directory) {
  const Folder folder = look_into(storage, directory);
  if (folder.whole) return Reader(storage, directory).read(read_metadata(storage, join(directory, kMetadataName)), {});
  if (!folder.metadata.empty()) {
    Joined joined(storage, directory, folder);
    const auto twins = joined.twins();
    return Reader(storage, directory).read(joined.take(), twins);
  }
  if (!folder.data.empty())
    fail(ErrorKind::kCorrupt, directory, ": a save that did not finish: there are data files of ", folder.data.size(),
         folder.data.size() == 1 ? " rank" : " ranks", ", but no '.metadata', which is written last");
  return read_dcp_hf(storage, directory);
}

}  // namespace shardsmith
