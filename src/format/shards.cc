#include "format/shards.h"

#include <map>
#include <set>
#include <unordered_map>

#include "base/error.h"
#include "format/pt.h"
#include "format/safetensors.h"

namespace shardsmith {
namespace {

// Hugging Face's cache keeps a revision as links: snapshots/{revision}/{name} -> ../../blobs/{digest}.
bool is_cache_link(const std::string& target) {
  constexpr std::string_view kBlobs = "../../blobs/";
  if (!target.starts_with(kBlobs) || target.size() == kBlobs.size()) return false;
  return target.find_first_not_of("0123456789abcdef", kBlobs.size()) == std::string::npos;
}

}  // namespace

void check_file_name(Storage& storage, const std::string& where, const std::string& directory,
                     const std::string& name) {
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
      name.find('\\') != std::string::npos || name.find('\0') != std::string::npos)
    fail(ErrorKind::kCorrupt, where, ": refused: it names the file '", name,
         "', which is not a plain name in this folder");
  const Stat stat = storage.stat(join(directory, name));
  if (stat.is_link && !is_cache_link(storage.read_link(join(directory, name))))
    fail(ErrorKind::kCorrupt, where, ": refused: '", name, "' is a link; put the file itself into the folder");
  if (stat.is_directory) fail(ErrorKind::kCorrupt, where, ": '", name, "' is a folder, not a file of weights");
}

namespace {

// file -> the tensors that the map says are in it, files in the order of their names.
using Shards = std::map<std::string, std::set<std::string>>;

Shards read_map(Storage& storage, const std::string& directory, const std::string& index_path) {
  const Value root = parse_json(read_text(storage, index_path, 100'000'000), index_path);
  const Value* map = root.find("weight_map");
  const Dict* dict = map ? map->get_if<Dict>() : nullptr;
  if (!dict) fail(ErrorKind::kCorrupt, index_path, ": it has no 'weight_map'");
  Shards shards;
  for (const auto& [key, value] : dict->items) {
    const std::string* file = value.get_if<std::string>();
    if (!file)
      fail(ErrorKind::kCorrupt, index_path, ": its weight map gives tensor '", *key.get_if<std::string>(), "' no file");
    shards[*file].insert(*key.get_if<std::string>());
  }
  std::string missing;
  size_t count = 0;
  for (const auto& [name, tensors] : shards) {
    check_file_name(storage, index_path, directory, name);
    if (storage.stat(join(directory, name)).exists) continue;
    missing += (count++ ? ", " : "") + name;
  }
  if (count) fail(ErrorKind::kCorrupt, directory, ": ", count, " of ", shards.size(), " files are missing: ", missing);
  return shards;
}

// A file's texts; where two files differ, the first one's.
void add_metadata(const Value& from, Value& to) {
  for (const auto& [key, text] : from.get_if<Dict>()->items)
    if (!to.find(*key.get_if<std::string>())) to.set(*key.get_if<std::string>(), text);
}

}  // namespace

Index read_shards(Storage& storage, const std::string& directory, const std::string& index_path) {
  const Shards shards = read_map(storage, directory, index_path);
  Index all;
  all.values = Value(Dict{});
  std::unordered_map<std::string, std::string> home;  // tensor -> file
  std::vector<TensorEntry> ties;                      // that a file's metadata tell, beside what the map lists
  for (const auto& [name, expected] : shards) {
    const std::string path = join(directory, name);
    Index shard = is_safetensors(storage, path) ? read_safetensors(storage, path) : read_pt(storage, path);
    std::set<std::string> left = expected;
    for (TensorEntry& tensor : shard.tensors) {
      if (!tensor.alias_of.empty() && !expected.contains(tensor.name)) {
        ties.push_back(std::move(tensor));
        continue;
      }
      const auto [first, is_new] = home.emplace(tensor.name, name);
      if (!is_new)
        fail(ErrorKind::kCorrupt, directory, ": tensor '", tensor.name, "' is in two files, ", first->second, " and ",
             name);
      left.erase(tensor.name);
      for (Slice& slice : tensor.slices) slice.file += static_cast<uint32_t>(all.files.size());
      all.tensors.push_back(std::move(tensor));
    }
    if (!left.empty())
      fail(ErrorKind::kCorrupt, index_path, ": tensor '", *left.begin(), "' should be in ", name, ", but is not (",
           left.size(), " such in this file)");
    for (FileEntry& file : shard.files) all.files.push_back(std::move(file));
    if (shard.format == "safetensors") add_metadata(shard.values, all.values);
  }
  for (TensorEntry& tie : ties)
    if (home.contains(tie.alias_of) && home.emplace(tie.name, "").second) all.tensors.push_back(std::move(tie));
  all.reindex();
  return all;
}

}  // namespace shardsmith
