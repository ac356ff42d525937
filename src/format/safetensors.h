// safetensors: u64 header length, JSON, bytes. Bytes: docs/formats/safetensors.md.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "format/source.h"
#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith {

bool is_safetensors(Storage& storage, const std::string& path);  // by its first bytes

// Trusts nothing: header length, offsets without hole or overlap, shapes by checked multiplication,
// duplicate keys, metadata of strings. `__metadata__` becomes Index::values. A pair of names in it, of which the second
// is a tensor of the file and the first is not, is a tie (safetensors' save_model leaves it): an alias. Throws
// kCorrupt.
Index read_safetensors(Storage& storage, const std::string& path);

// A folder with `model.safetensors.index.json`, or another one `*.safetensors.index.json`; no config.json is needed.
bool is_safetensors_folder(Storage& storage, const std::string& directory);
// Format "safetensors"; checks as read_hf does. kInvalidArgument where there are several such indices.
Index read_safetensors_folder(Storage& storage, const std::string& directory);

struct SafetensorsTensor {
  std::string name;
  Dtype dtype;
  Shape shape;
  ByteSource source;  // packed row-major, little-endian
};

// The bytes that the reference writer gives for the same input (order by dtype descending, then name).
// Appears whole or not at all. Throws kUnsupported that names the tensor whose dtype it has no word for.
void write_safetensors(Storage& storage, const std::string& path, std::vector<SafetensorsTensor> tensors,
                       const std::vector<std::pair<std::string, std::string>>& metadata);

}  // namespace shardsmith
