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
  // Other ranks give a file of this name with the same bytes (replicas): each writes a share of it (shared_files.h).
  bool shared = false;
};

struct SaveRequest {
  std::string path;             // the folder of checkpoints; made if missing
  std::string tag;              // the same on all ranks (checked before anything is written); no '/', not empty
  Manifest manifest;            // rank 0's counts; save_id, time, files are filled in here
  std::vector<SaveFile> files;  // this rank's, may be empty
  std::optional<int> num_kept_partial_checkpoints;  // nullopt or negative: keep all
  std::chrono::milliseconds deadline{300000};       // for each exchange
  Progress progress;
  std::string host;  // "": host_identity(); for tests
};

struct SaveResult {
  std::string folder;  // path/{tag}_partial
  uint64_t bytes = 0;  // of all ranks
  std::vector<std::string> pruned;
  // The checkpoint is there and durable, but something about tidying up failed; one line each.
  std::vector<std::string> warnings;
};

// Called by all ranks. Throws the first failing rank's error on every rank; nothing is then visible, and what was
// there before still is. Hops: all agree -> rank 0 prepares the folder -> all write -> rank 0 commits; after each the
// ranks exchange outcomes, so that none goes on where another has failed. Where files are shared there is one hop more,
// in which the checksums that all have taken are put together.
SaveResult save_partial(Storage& storage, Peers& peers, const SaveRequest& request);

// One process, all files of all ranks, into an existing empty folder: everything is durable when it returns, and what
// gives the folder its name is up to the caller. save_id, time and files are filled in; no `newest` is touched.
Manifest write_partial(Storage& storage, const std::string& folder, Manifest manifest,
                       const std::vector<SaveFile>& files);

// Throws kInvalidArgument that names what differs (model_type, hidden size, layers, vocabulary) if `path` holds a
// checkpoint of a model other than `model_config` describes. Checkpoints that don't say are passed over.
void check_same_model(Storage& storage, const std::string& path, const Value& model_config);

}  // namespace shardsmith
