// Any readable thing as an Index, for the verbs that take one.
#pragma once

#include <optional>
#include <string>

#include "checkpoint/manifest.h"
#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith::cli {

struct Source {
  std::string format;  // "pt", "safetensors", "hf", "dcp", "partial", "full"
  Index index;
  std::optional<Manifest> manifest;  // of a checkpoint of ours
};

// A path as people give it: links are followed (a Storage follows none), trailing slashes dropped. What isn't there
// stays as it is.
std::string given_path(const std::string& path);
// Throws kCorrupt where there is something that we don't know, with what it may be instead.
std::string known_format(Storage& storage, const std::string& path);
Source open_source(Storage& storage, const std::string& path);

}  // namespace shardsmith::cli
