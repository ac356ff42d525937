// A Hugging Face folder: config.json, and safetensors or .bin files, one or sharded with an index.
#pragma once

#include <string>

#include "format/safetensors.h"
#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith {

bool is_hf(Storage& storage, const std::string& directory);  // has config.json and weights

// config.json as a Value; kNotFound / kCorrupt with the path.
Value read_hf_config(Storage& storage, const std::string& directory);

// Names as in the files. model.safetensors, its index, pytorch_model.bin, its index, in this order.
// A weight map with "../", an absolute path or a link out of the folder, a shard that is not there, a tensor in two
// files or not in the file that the map says: kCorrupt (all missing shards are listed). Index::values is the config.
Index read_hf(Storage& storage, const std::string& directory);

}  // namespace shardsmith
