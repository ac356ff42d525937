// Opening and reading checkpoints.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/peers.h"
#include "checkpoint/manifest.h"
#include "layout/plan.h"
#include "storage/storage.h"
#include "storage/transfer.h"

namespace shardsmith {

enum class CheckpointKind { kPartial, kFull };

// One checkpoint in a directory of them.
struct Found {
  CheckpointKind kind = CheckpointKind::kPartial;
  std::string folder;  // full path of the folder that holds it (may be the `.old` one); of a full one, of its weights
  std::string name;    // "{tag}_partial", or "{tag}"
  bool complete = false;
  std::string why_not;  // where it is not complete, in one line
  std::optional<Manifest> manifest;
  uint64_t bytes = 0;
  bool newest = false;  // the pointer names it
};

// All that is in `path`, partial and full, complete or not, newest first by the manifest's (step, time), never by name.
// `.{name}.old` counts under `name` where `name` itself is not complete. Vanishing files are tolerated. kNotFound if
// path isn't there. Complete: the manifest is there and each named file has its size and its extra record's digest.
std::vector<Found> scan(Storage& storage, const std::string& path);

// Of what scan() gives, to the end: checkpoints beyond the step of the one that was saved last. They are of a run that
// was abandoned, as the last one came from one before them.
void put_abandoned_last(std::vector<Found>& found, int64_t last_step);

// What to resume from, of one kind: the tag (or name) if given, else the one `newest` names if it is of the kind and
// complete, else the newest complete one of the kind, where `newest` names one of the other kind before those beyond
// its step. nullopt where there is none. What was passed over, and why, is added to `passed_over`.
std::optional<Found> find_checkpoint(Storage& storage, const std::string& path, const std::string& tag,
                                     std::vector<std::string>* passed_over,
                                     CheckpointKind kind = CheckpointKind::kPartial);

// A whole partial checkpoint as one Index, file by file as the manifest names them.
// Tensor names carry no rank: model tensors by their logical names under "model/", optimizer state as
// "optimizer/state/{logical name}/{exp_avg}"; of other files ("rng_3.pt", "user_content.pt") under the file's name
// without ".pt". Values: {"model": {name: tensor, ...}, "optimizer": [one Value per file], "rng_3": ...,
// "user_content": ...} Checks sizes, digests and that the slices cover each tensor once. kCorrupt otherwise.
Index read_partial(Storage& storage, const std::string& folder, const Manifest& manifest);

// Throws kCorrupt unless the file at `path` is the one that the manifest means: a plain file of its size and digest.
void check_file(Storage& storage, const std::string& path, const ManifestFile& file);

// ManifestFile::tail of a file as it is now.
std::string tail_digest(Storage& storage, const std::string& path);

// Full verification, see checkpoint/verify.h.
std::vector<std::string> verify_partial(Storage& storage, const std::string& folder, const Manifest& manifest,
                                        const Progress& progress = {});

}  // namespace shardsmith
