// Saving a partial checkpoint: every rank writes its files into a new folder beside the final one,
// outcomes are exchanged, rank 0 commits (see commit.h for the rule).
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/peers.h"
#include "base/progress.h"
#include "checkpoint/manifest.h"
#include "format/pt.h"
#include "storage/storage.h"

namespace shardsmith {

// One file of this rank.
struct SaveFile {
  std::string name;  // "model_0_0.pt"
  PtContent content;
};

struct SaveRequest {
  std::string path;  // the folder of checkpoints; made if missing
  std::string tag;   // the same on all ranks (checked before anything is written); no '/', not empty
  Manifest manifest; // rank 0's counts; save_id, time, files are filled in here
  std::vector<SaveFile> files;  // this rank's, may be empty
  std::optional<int> num_kept_partial_checkpoints;  // nullopt or negative: keep all
  std::chrono::milliseconds deadline{300000};       // for each exchange
  Progress progress;
};

struct SaveResult {
  std::string folder;  // path/{tag}_partial
  uint64_t bytes = 0;  // of all ranks
  std::vector<std::string> pruned;
};

// Called by all ranks. Throws the first failing rank's error on every rank; nothing is then visible, and what was
// there before still is.
SaveResult save_partial(Storage& storage, Peers& peers, const SaveRequest& request);

}  // namespace shardsmith
