// Which checkpoints of a folder may go. Pure, but for the look at the folder.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/load.h"
#include "storage/storage.h"

namespace shardsmith::cli {

struct PruneOptions {
  std::optional<int64_t> keep_last;   // the newest so many
  std::optional<int64_t> keep_every;  // those whose step is a multiple
  std::vector<std::string> keep;      // tags, or names of folders
  bool incomplete = false;            // also those that have our manifest but are not complete
};

struct Pruned {
  std::string name;
  int64_t step = 0;
  uint64_t bytes = 0;   // that its folder holds, whatever is in it
  std::string save_id;  // what it was when it was looked at
};

struct Kept {
  std::string name;
  std::string why;  // "the newest", "step 400 is a multiple of 200", ...
};

struct PrunePlan {
  std::vector<Pruned> gone;
  std::vector<Kept> kept;
  std::vector<Kept> left_alone;  // what is incomplete, unknown, or no checkpoint of ours
  uint64_t bytes() const;
};

// Never among those that go: the newest complete one, the one that `newest` names, a folder without our manifest, one
// of a newer format. Throws kInvalidArgument where a tag that is to be kept is not there, with the nearest one.
PrunePlan plan_prune(Storage& storage, const std::string& path, const PruneOptions& options);

// Looks once more, so that a checkpoint that was saved anew meanwhile stays; returns what was removed.
std::vector<Pruned> run_plan(Storage& storage, const std::string& path, const PrunePlan& plan);

}  // namespace shardsmith::cli
