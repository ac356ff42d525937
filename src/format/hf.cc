#include "format/hf.h"

#include <unordered_map>

#include "base/error.h"
#include "format/pt.h"
#include "format/shards.h"

namespace shardsmith {
namespace {

constexpr const char* kSafetensors = "model.safetensors";
constexpr const char* kSafetensorsIndex = "model.safetensors.index.json";
constexpr const char* kBin = "pytorch_model.bin";
constexpr const char* kBinIndex = "pytorch_model.bin.index.json";

bool is_there(Storage& storage, const std::string& directory, const char* name) {
  return storage.stat(join(directory, name)).exists;
}

// A state dict's names are names here, as in safetensors, and no paths: "a/b" is itself.
Index with_plain_names(Index index) {
  std::unordered_map<std::string, std::string> plain;
  if (const Dict* dict = index.values.get_if<Dict>()) {
    for (const auto& [key, item] : dict->items) {
      const TensorRef* ref = item.get_if<TensorRef>();
      if (const std::string* name = key.get_if<std::string>(); name && ref)
        plain.emplace(index.tensors[ref->index].name, *name);
    }
  }
  const auto rename = [&](std::string& name) {
    if (const auto found = plain.find(name); found != plain.end()) name = found->second;
  };
  for (TensorEntry& tensor : index.tensors) {
    rename(tensor.name);
    rename(tensor.alias_of);
  }
  index.reindex();
  return index;
}

Index read_weights(Storage& storage, const std::string& path) {
  return is_safetensors(storage, path) ? read_safetensors(storage, path) : with_plain_names(read_pt(storage, path));
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
    index = read_shards(storage, directory, join(directory, kSafetensorsIndex));
  else if (is_there(storage, directory, kBin))
    index = read_weights(storage, join(directory, kBin));
  else if (is_there(storage, directory, kBinIndex))
    index = read_shards(storage, directory, join(directory, kBinIndex));
  else
    fail(ErrorKind::kNotFound, directory, ": no weights: neither ", kSafetensors, " nor ", kBin,
         ", nor an index of either");
  index.format = "hf";
  index.values = std::move(config);
  index.reindex();
  return index;
}

}  // namespace shardsmith
