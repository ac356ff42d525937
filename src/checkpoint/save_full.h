// Saving a full checkpoint by all ranks together: each writes its own blocks of the one file, none holds the whole.
//
// Hops: all announce what they hold and agree -> rank 0 prepares the folder and makes the files -> all write their
// blocks, fetching what others hold (gather.h) -> all checksums are exchanged -> what depends on them is written, all
// fsync -> rank 0 commits as full.h says, replaces `newest` and prunes. After each hop the ranks exchange outcomes, so
// that none goes on where another has failed.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/peers.h"
#include "base/progress.h"
#include "base/transport.h"
#include "checkpoint/manifest.h"
#include "checkpoint/save.h"
#include "format/pt.h"
#include "storage/storage.h"

namespace shardsmith {

struct FullRequest {
  std::string path;   // the folder of checkpoints; made if missing
  std::string tag;    // the weights' file; the same on all ranks, like path
  Manifest manifest;  // rank 0's counts; save_id, time, files are filled in here
  // What this rank holds: slices as in a partial checkpoint's files (names "model/...", "optimizer/..."), bytes in
  // memory, unchanged until the call returns. A rank that holds nothing of a file may leave it out; one that all leave
  // out is not written, but for the weights.
  std::optional<PtContent> weights, optimizer;
  std::optional<PtContent> user_content;  // rank 0's counts
  bool translate = true;  // weights under Hugging Face names, where manifest.model_config's family is known
  std::optional<int> num_kept_partial_checkpoints;  // nullopt or negative: keep all
  std::chrono::milliseconds deadline{300000};       // for each exchange and each move
  Progress progress;
  std::string host;  // "": host_identity(); for tests
};

// Called by all ranks. Throws the first failing rank's error on every rank; nothing is then visible, and what was there
// before still is. `transport` may be null where no rank needs another's bytes (one process, or replicas alone).
// SaveResult::folder is the weights' path.
SaveResult save_full(Storage& storage, Peers& peers, Transport* transport, const FullRequest& request);

}  // namespace shardsmith
