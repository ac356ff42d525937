// Any readable thing as an Index, for the verbs that take one.
#pragma once

#include <optional>
#include <string>

#include "checkpoint/manifest.h"
#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith::cli {

struct Source {
  std::string format;  // "pt", "safetensors", "hf", "partial"
  Index index;
  std::optional<Manifest> manifest;  // of a partial checkpoint
};

// Throws kCorrupt where there is something that we don't know, with what it may be instead.
std::string known_format(Storage& storage, const std::string& path);
Source open_source(Storage& storage, const std::string& path);

}  // namespace shardsmith::cli
