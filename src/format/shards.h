// Several files of weights with a JSON index: {"weight_map": {tensor: file}}.
#pragma once

#include <string>

#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith {

// A file's name that comes from a file's author must be a bare name of a file in `directory`, and no link, which may
// lead anywhere, but for the links of Hugging Face's cache into its own blobs. Throws kCorrupt that begins with
// `where`.
void check_file_name(Storage& storage, const std::string& where, const std::string& directory, const std::string& name);

// Reads all files of the weight map at `index_path`, each safetensors or .pt by its content. Throws kCorrupt that lists
// the files that are missing, or names a tensor that is in two files, or not in the file that the map says.
// Index::values are the texts of safetensors' `__metadata__`.
Index read_shards(Storage& storage, const std::string& directory, const std::string& index_path);

}  // namespace shardsmith
