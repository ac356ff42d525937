// What is at a path? Recognised by content, never by name.
#pragma once

#include <string>

#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith {

// "pt", "safetensors", "hf", "partial" (a folder with our manifest) or "" where it is none of them.
// kNotFound if there is nothing.
std::string detect_format(Storage& storage, const std::string& path);

}  // namespace shardsmith
