// What is at a path? Recognised by content, never by name.
#pragma once

#include <string>

#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith {

// "pt", "safetensors" (a file, or a folder with an index but no config.json), "hf", "dcp", "partial" (a folder with our
// manifest), "pickle" (a bare one, see format/bare_pickle.h) or "" where it is none of them.
// kNotFound if there is nothing.
std::string detect_format(Storage& storage, const std::string& path);

}  // namespace shardsmith
