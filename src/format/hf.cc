#include "format/hf.h"

#include <map>
#include <set>
#include <unordered_map>

#include "base/error.h"
#include "format/pt.h"

namespace shardsmith {
namespace {

constexpr const char* kSafetensors = "model.safetensors";
constexpr const char* kSafetensorsIndex = "model.safetensors.index.json";
constexpr const char* kBin = "pytorch_model.bin";
constexpr const char* kBinIndex = "pytorch_model.bin.index.json";

bool is_there(Storage& storage, const std::string& directory, const char* name) {
  return storage.stat(join(directory, name)).exists;
}

Index read_weights(Storage& storage, const std::string& path) {
  return is_safetensors(storage, path) ? read_safetensors(storage, path) : read_pt(storage, path);
}

// Hugging Face's cache keeps a revision as links: snapshots/{revision}/{name} -> ../../blobs/{digest}.
bool is_cache_link(const std::string& target) {
  constexpr std::string_view kBlobs = "../../blobs/";
  if (!target.starts_with(kBlobs) || target.size() == kBlobs.size()) return false;
  return target.find_first_not_of("0123456789abcdef", kBlobs.size()) == std::string::npos;
}

// A file's name in a weight map comes from the file's author: it must be a bare name of a file in this folder, and no
// link, which may lead anywhere, but for the cache's own.
void check_name(Storage& storage, const std::string& index_path, const std::string& directory,
                const std::string& name) {
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
      name.find('\\') != std::string::npos || name.find('\0') != std::string::npos)
    fail(ErrorKind::kCorrupt, index_path, ": refused: its weight map names the file '", name,
         "', which is not a plain name in this folder");
  const Stat stat = storage.stat(join(directory, name));
  if (stat.is_link && !is_cache_link(storage.read_link(join(directory, name))))
    fail(ErrorKind::kCorrupt, index_path, ": refused: '", name, "' is a link; put the file itself into the folder");
  if (stat.is_directory) fail(ErrorKind::kCorrupt, index_path, ": '", name, "' is a folder, not a file of weights");
}

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
    check_name(storage, index_path, directory, name);
    if (storage.stat(join(directory, name)).exists) continue;
    missing += (count++ ? ", " : "") + name;
  }
  if (count) fail(ErrorKind::kCorrupt, directory, ": ", count, " of ", shards.size(), " files are missing: ", missing);
  return shards;
}

Index read_sharded(Storage& storage, const std::string& directory, const std::string& index_path) {
  const Shards shards = read_map(storage, directory, index_path);
  Index all;
  std::unordered_map<std::string, std::string> home;  // tensor -> file
  for (const auto& [name, expected] : shards) {
    Index shard = read_weights(storage, join(directory, name));
    std::set<std::string> left = expected;
    for (TensorEntry& tensor : shard.tensors) {
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
  }
  return all;
}

}  // namespace

bool is_hf(Storage& storage, const std::string& directory) {
  if (!is_there(storage, directory, "config.json")) return false;
  for (const char* name : {kSafetensors, kSafetensorsIndex, kBin, kBinIndex})
    if (is_there(storage, directory, name)) return true;
  return false;
}

Value read_hf_config(Storage& storage, const std::string& directory) {
  const std::string path = join(directory, "config.json");
  if (!storage.stat(path).exists)
    fail(ErrorKind::kNotFound, path, ": not there; a Hugging Face model folder holds one");
  Value config = parse_json(read_text(storage, path, 16 << 20), path);
  if (!config.get_if<Dict>()) fail(ErrorKind::kCorrupt, path, ": no JSON object");
  return config;
}

Index read_hf(Storage& storage, const std::string& directory) {
  Value config = read_hf_config(storage, directory);
  Index index;
  if (is_there(storage, directory, kSafetensors))
    index = read_weights(storage, join(directory, kSafetensors));
  else if (is_there(storage, directory, kSafetensorsIndex))
    index = read_sharded(storage, directory, join(directory, kSafetensorsIndex));
  else if (is_there(storage, directory, kBin))
    index = read_weights(storage, join(directory, kBin));
  else if (is_there(storage, directory, kBinIndex))
    index = read_sharded(storage, directory, join(directory, kBinIndex));
  else
    fail(ErrorKind::kNotFound, directory, ": no weights: neither ", kSafetensors, " nor ", kBin,
         ", nor an index of either");
  index.format = "hf";
  index.values = std::move(config);
  index.reindex();
  return index;
}

}  // namespace shardsmith
