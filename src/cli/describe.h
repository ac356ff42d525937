// Manifests in words and JSON, as several verbs print them.
#pragma once

#include <climits>
#include <string>
#include <vector>

#include "base/value.h"
#include "checkpoint/load.h"
#include "checkpoint/manifest.h"
#include "layout/mesh.h"
#include "storage/storage.h"

namespace shardsmith::cli {

// "4 ranks: pp 2, rdp 2": degrees of 1 are left out.
std::string layout_words(const Manifest& manifest);
// "layers 0-14, embedding": what stage `stage` holds.
std::string stage_words(const Partition& partition, int stage);
// The ranks of one stage, one string for each tensor-parallel slice: {"0, 2", "1, 3"}. Beyond `most` of one slice only
// their number is said: "0, 2, ... (512 ranks)".
std::vector<std::string> stage_ranks(const Mesh& mesh, int stage, int most = INT_MAX);
// Which ranks hold which layers, as a small text picture.
std::string layout_picture(const Manifest& manifest);

Value to_value(const std::vector<std::string>& words);
Value manifest_value(const Manifest& manifest);

// The checkpoint in `folder` or, as people also point at it, its manifest; kCorrupt with the reason (no manifest: a
// save that did not finish).
Manifest open_manifest(Storage& storage, const std::string& folder);

// As given_path, of what must be there; otherwise kNotFound with the name beside it that may be meant: a tag stands for
// its folder there.
std::string existing_path(Storage& storage, const std::string& path);
// kInvalidArgument, saying what to do instead, for a file and for a checkpoint itself.
void check_folder_of_checkpoints(Storage& storage, const std::string& path);

// Tells a folder of checkpoints from one of them: something in it is a checkpoint, or `newest` is there.
bool holds_checkpoints(Storage& storage, const std::string& path);

}  // namespace shardsmith::cli
