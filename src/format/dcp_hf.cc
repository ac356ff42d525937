#include "format/dcp_hf.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "format/safetensors.h"
#include "format/shards.h"

namespace shardsmith {
namespace {

constexpr const char* kInfo = "DCP_SHARDING_INFO";
constexpr std::string_view kSuffix = ".safetensors";

std::vector<std::string> weight_files(Storage& storage, const std::string& directory) {
  std::vector<std::string> names;
  for (const std::string& name : storage.list(directory))
    if (name.ends_with(kSuffix)) names.push_back(name);
  return names;
}

// The number behind `word`, five digits or more; -1 if the name has none.
int64_t number_after(const std::string& name, std::string_view word, size_t& at) {
  if (name.compare(at, word.size(), word) != 0) return -1;
  at += word.size();
  int64_t number = 0;
  const size_t begin = at;
  for (; at < name.size() && name[at] >= '0' && name[at] <= '9' && at - begin < 9; ++at)
    number = 10 * number + (name[at] - '0');
  return at == begin ? -1 : number;
}

// model-00001-of-00002.safetensors, shard-00001-model-00001-of-00002.safetensors: what the names of some files say
// about others. Of each shard all parts must be there, unless it had nothing to put into one; of the shards, all up to
// the last that is there.
void check_files(const std::vector<std::string>& names, const std::string& directory) {
  std::set<int64_t> shards, parts;
  int64_t count = 0;
  for (const std::string& name : names) {
    size_t at = 0;
    if (const int64_t shard = number_after(name, "shard-", at); shard >= 0) {
      shards.insert(shard);
      if (at < name.size() && name[at] == '-') ++at;
    }
    const int64_t part = number_after(name, "model-", at);
    const int64_t of = part >= 0 ? number_after(name, "-of-", at) : -1;
    if (part < 0 || of < 0) continue;
    parts.insert(part);
    count = std::max(count, of);
  }
  for (int64_t shard = 1; !shards.empty() && shard <= *shards.rbegin(); ++shard)
    if (!shards.contains(shard))
      fail(ErrorKind::kCorrupt, directory, ": the files of shard ", shard,
           " are missing, though there are some of shard ", *shards.rbegin());
  for (int64_t part = 1; part <= count && part <= static_cast<int64_t>(names.size()) + 1; ++part)
    if (!parts.contains(part))
      fail(ErrorKind::kCorrupt, directory, ": no file 'model-",
           std::string(part < 10000 ? 5 - std::to_string(part).size() : 0, '0'), part, "-of-...', though there are ",
           count, " parts");
}

// Where in its tensor the piece begins; zeros where the file says nothing.
Shape offset_of(const Value& info, const TensorEntry& piece, const std::string& path) {
  if (info.is_none()) return Shape(piece.shape.size(), 0);
  const Value* entry = info.find(piece.name);
  const Value* saved = entry ? entry->find("saved_offsets") : nullptr;
  const List* list = saved ? saved->get_if<List>() : nullptr;
  if (!list || list->size() != piece.shape.size())
    fail(ErrorKind::kCorrupt, path, ": ", kInfo, " has no 'saved_offsets' of tensor '", piece.name, "' with ",
         piece.shape.size(), " dimensions");
  Shape offset;
  for (const Value& item : *list) {
    const int64_t* n = item.get_if<int64_t>();
    if (!n || *n < 0)
      fail(ErrorKind::kCorrupt, path, ": ", kInfo, ": tensor '", piece.name, "': an offset that is none");
    offset.push_back(*n);
  }
  return offset;
}

void add_piece(TensorEntry piece, const Shape& offset, Index& all, std::map<std::string, size_t>& numbers,
               const std::string& path) {
  const auto [found, is_new] = numbers.emplace(piece.name, all.tensors.size());
  if (is_new) {
    TensorEntry entry;
    entry.name = piece.name;
    entry.dtype = piece.dtype;
    entry.shape = Shape(piece.shape.size(), 0);
    all.tensors.push_back(std::move(entry));
  }
  TensorEntry& entry = all.tensors[found->second];
  if (entry.dtype != piece.dtype || entry.shape.size() != piece.shape.size())
    fail(ErrorKind::kCorrupt, path, ": tensor '", piece.name, "' is ", to_string(piece.dtype), " ",
         to_string(piece.shape), ", of another kind than in the files before");
  const bool empty = volume(piece.shape) == 0;
  for (size_t d = 0; d < offset.size(); ++d) {
    int64_t end = 0;
    if (__builtin_add_overflow(offset[d], piece.shape[d], &end))
      fail(ErrorKind::kCorrupt, path, ": tensor '", piece.name, "' ends beyond 63 bits");
    entry.shape[d] = std::max(entry.shape[d], end);
  }
  Slice slice = piece.slices[0];
  slice.box = {offset, piece.shape};
  slice.file = static_cast<uint32_t>(all.files.size() - 1);
  if (!empty || entry.slices.empty()) entry.slices.push_back(std::move(slice));
}

// Pieces without elements stay only where the whole tensor has none.
void drop_empty_pieces(TensorEntry& tensor) {
  if (volume(tensor.shape) == 0) return;
  std::erase_if(tensor.slices, [](const Slice& slice) { return volume(slice.box.extent) == 0; });
}

}  // namespace

bool is_dcp_hf(Storage& storage, const std::string& directory) {
  for (const std::string& name : weight_files(storage, directory)) {
    const std::string path = join(directory, name);
    try {
      if (storage.stat(path).is_directory || !is_safetensors(storage, path)) continue;
      return read_safetensors(storage, path).values.find(kInfo) != nullptr;
    } catch (const Error& e) {
      if (e.kind() == ErrorKind::kNotFound) continue;  // a link that leads nowhere
      if (e.kind() != ErrorKind::kCorrupt && e.kind() != ErrorKind::kUnsupported) throw;
      return false;
    }
  }
  return false;
}

Index read_dcp_hf(Storage& storage, const std::string& directory) {
  const std::vector<std::string> names = weight_files(storage, directory);
  if (names.empty())
    fail(ErrorKind::kCorrupt, directory, ": no distributed checkpoint: neither '.metadata' nor safetensors files");
  check_files(names, directory);
  Index all;
  all.format = "dcp";
  std::map<std::string, size_t> numbers;
  for (const std::string& name : names) {
    check_file_name(storage, directory, directory, name);
    const std::string path = join(directory, name);
    Index shard = read_safetensors(storage, path);
    const Value* text = shard.values.find(kInfo);
    const Value info = text ? parse_json(*text->get_if<std::string>(), str(path, ": ", kInfo)) : Value();
    all.files.push_back(shard.files[0]);
    for (TensorEntry& piece : shard.tensors) {
      if (!piece.alias_of.empty()) continue;
      const Shape offset = offset_of(info, piece, path);
      add_piece(std::move(piece), offset, all, numbers, path);
    }
  }
  Dict values;
  for (size_t i = 0; i < all.tensors.size(); ++i) {
    drop_empty_pieces(all.tensors[i]);
    values.items.emplace_back(Value(all.tensors[i].name), Value(TensorRef{i}));
    all.tensors[i].name = path_join("", all.tensors[i].name);
  }
  all.values = Value(std::move(values));
  all.reindex();
  validate(all);
  return all;
}

}  // namespace shardsmith
