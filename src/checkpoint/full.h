// A full checkpoint: the whole model in one file that torch.load reads, and what belongs to it beside it.
//
//   {tag}                  the weights: a dict of the model's state
//   user_content_{tag}     where there is any
//   optimizer_{tag}        the merged optimizer, where there is one
//
// The weights' extra record holds, under "full", a manifest whose files are the companions: so the weights, which get
// their name last, stand for all of it.
//
//   1. All files are written into  .{tag}.tmp-{save_id}/  and synced, the companions first, as the weights name their
//      digests.
//   2. What stands under the names is moved into  .{tag}.old/ .
//   3. The companions get their names, then the weights; the folder is synced.
//   4. .{tag}.old/ and the temporary folder are removed.
// Where 2 or 3 fail, what was moved is moved back; where the process dies, recover_full() does that. Once the new files
// are durable it has succeeded: what 4 can't remove is told, and is no error.
// While the new weights have no name, the old ones in  .{tag}.old/  stand in for them, with the companions that are
// there or still have their names: the weights are moved first.
// Saved by several ranks (save_full.h), 1 is done by all; and between 3 and 4 `newest` is replaced: if that fails, 3
// and 2 are undone.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/manifest.h"
#include "format/pt.h"
#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith {

struct FullContent {
  PtContent weights;
  std::optional<PtContent> optimizer, user_content;
};

// A .pt file whose extra record says so.
bool is_full(Storage& storage, const std::string& path);

// Names as in a partial checkpoint: "model/...", "optimizer/state/...", "user_content/..."; values {"model",
// "optimizer", "user_content"}. kCorrupt where a companion is missing or belongs to another save. `manifest` gets what
// the weights' record says.
Index read_full(Storage& storage, const std::string& path, Manifest* manifest);

// What the weights' record says. kCorrupt where it says nothing.
Manifest full_manifest(Storage& storage, const std::string& path);

// As look_at() for a folder: reads the records, no tensor data. kAbsent, kComplete, kIncomplete (not ours, or a
// companion is missing or of another save), kUnknown (of a newer format). Errors of the storage (kIo) are thrown.
FolderState look_at_full(Storage& storage, const std::string& path);

// Of the weights at `path` and their companions.
uint64_t full_bytes(Storage& storage, const std::string& path, const Manifest& manifest);

// PtContent::extra of the weights.
Value full_extra(const Manifest& manifest);

// The files of the full checkpoint at `path` (its weights first), complete or not.
std::vector<std::string> full_files(const std::string& path);

// One process. `path`: the weights' file to be; its folder exists. save_id, time and files are filled in. What was
// there is replaced as a whole. `before_names` is called between the last byte and the first name; what it throws ends
// it all. `left_behind` gets a line for each thing of step 4 that could not be removed.
Manifest write_full(Storage& storage, const std::string& path, Manifest manifest, const FullContent& content,
                    const std::function<void()>& before_names = {}, std::vector<std::string>* left_behind = nullptr);

// Finishes or undoes what a dead write left: weights at `path` that are complete stay, and `.old` goes; otherwise the
// old files get their names back, the weights last. Temporary folders go. Returns whether old files have come back. May
// die and run again.
bool recover_full(Storage& storage, const std::string& path);

}  // namespace shardsmith
