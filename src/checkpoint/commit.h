// The commit rule, told once.
//
//   1. Everything is written into  path/.{name}.tmp-{save_id}/ ; every rank fsyncs its files and
//      answers; any failure: all throw, rank 0 removes the folder after all have answered.
//   2. Rank 0 writes manifest.json there, fsyncs it and the folder.
//   3. The folder takes its name:
//        name free:            rename; fsync(path)
//        exchange works here:  exchange(tmp, name); fsync(path); remove the old content (now under tmp's name)
//        otherwise:            name -> .{name}.old; tmp -> name; fsync(path); remove .{name}.old
//      ("works here" is probed in that very directory, contents checked.)
//   4. `newest` is replaced (synced temporary + rename), then old checkpoints are pruned: each is first
//      renamed to .{name}.gone-{save_id}, then removed, so that a half-removed folder never has a name.
//   At whatever instant the machine dies, `newest`, or the scan that replaces it, finds a complete checkpoint:
//   scan counts a complete .{name}.old as {name} where {name} is missing or incomplete, and recover() finishes
//   or undoes what a dead save left.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "storage/storage.h"

namespace shardsmith {

inline constexpr const char* kNewestName = "newest";

std::string partial_name(const std::string& tag);  // "{tag}_partial"
std::string temporary_folder(const std::string& path, const std::string& name, const std::string& save_id);

// Steps 3 (rank 0 only). `folder` holds manifest.json already, synced.
void publish(Storage& storage, const std::string& path, const std::string& folder, const std::string& name);
// Step 4: the pointer. Holds the bare name.
void write_newest(Storage& storage, const std::string& path, const std::string& name);
// The name in `newest`, "" where there is none or it is not a bare name.
std::string read_newest(Storage& storage, const std::string& path);

// Finishes or undoes what a dead save left: .old where the name is missing or incomplete goes back, else is removed;
// .tmp-* and .gone-* are removed. Rank 0, before a save. Never touches a folder it doesn't know.
void recover(Storage& storage, const std::string& path);

// Removes complete checkpoints beyond the newest `keep`, never `just_saved`, never a folder without our manifest.
// Returns the names removed.
std::vector<std::string> prune(Storage& storage, const std::string& path, int keep, const std::string& just_saved);

}  // namespace shardsmith
