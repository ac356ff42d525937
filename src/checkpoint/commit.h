// The commit rule, told once.
//
//   1. Everything is written into  path/.{name}.tmp-{save_id}/ ; every rank fsyncs its files and
//      answers; any failure: all throw, rank 0 removes the folder after all have answered.
//   2. Rank 0 writes manifest.json there, fsyncs it and the folder.
//   3. The folder takes its name:
//        name free:            rename; fsync(path)
//        exchange works here:  exchange(tmp, name); fsync(path)      (the old content is now under tmp's name)
//        otherwise:            name -> .{name}.old; tmp -> name; fsync(path)
//      ("works here" is probed in that very directory, contents checked.)
//   4. `newest` is replaced (synced temporary + rename). If 3 or 4 fail, 3 is undone, `newest` is set back, and the
//   save
//      has failed. From here on it has not: what follows only tidies up, and a failure of it is a warning.
//   5. What the name held before is removed. Then old checkpoints are pruned: each is first renamed to
//      .{name}.gone-{save_id}, path is fsynced, and only then they are removed, so that a half-removed folder never has
//      a name.
//   At whatever instant the machine dies, `newest`, or the scan that replaces it, finds a complete checkpoint:
//   scan counts a complete .{name}.old as {name} where {name} is missing or incomplete, and recover() finishes
//   or undoes what a dead save left.
//
//   Where it dies            what is seen until the next save        what the next save's recover() does
//   in 1 or 2                as before                               removes .{name}.tmp-*
//   in 3, between renames    .{name}.old stands in for {name}        puts it back
//   in 3, after the rename   the new one, by scan where `newest`     removes .{name}.old or .{name}.tmp-*
//                            doesn't name it
//   in 4, 5                  the new one                             removes .newest.tmp-*, .old, .tmp-*, .gone-*
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/manifest.h"
#include "storage/storage.h"

namespace shardsmith {

inline constexpr const char* kNewestName = "newest";

std::string partial_name(const std::string& tag);  // "{tag}_partial"
std::string temporary_folder(const std::string& path, const std::string& name, const std::string& save_id);
std::string old_folder(const std::string& path, const std::string& name);
// 16 hexadecimal digits, another one each time.
std::string make_save_id();
bool is_save_id(std::string_view text);
double seconds_now();  // since 1970: Manifest::time

// What stands at a folder.
enum class Completeness {
  kAbsent,
  kComplete,
  kIncomplete,  // no manifest, or files that are not what it says
  kUnknown,     // a manifest of a newer format: neither to be used nor to be touched
};
struct FolderState {
  Completeness completeness = Completeness::kAbsent;
  std::string why;  // where it is not complete, in one line
  std::optional<Manifest> manifest;
};
// Reads the manifest and each file's extra record, no tensor data. Errors of the storage (kIo) are thrown: they say
// nothing about the checkpoint.
FolderState look_at(Storage& storage, const std::string& folder);

// Step 3, by rank 0 only. `folder` holds manifest.json already, synced. Not thread-safe.
class Publication {
 public:
  // Throws after having put everything back as far as the storage lets it.
  Publication(Storage& storage, const std::string& path, const std::string& folder, const std::string& name);
  // As before; the new content is under `folder` again. Never throws: what can't be put back now, recover() puts back.
  void undo() noexcept;
  // Removes what the name held before.
  void finish();

 private:
  void put_in_place();

  Storage& storage_;
  std::string path_, folder_, name_;
  bool moved_aside_ = false;  // the old content is at .{name}.old
  bool exchanged_ = false;    // the old content is at folder_
  bool in_place_ = false;     // the new content has its name
};

// Whether RENAME_EXCHANGE swaps two folders of `path`, contents and all. Leaves nothing behind.
bool exchange_works(Storage& storage, const std::string& path);

// Step 4: the pointer. Holds the bare name.
void write_newest(Storage& storage, const std::string& path, const std::string& name);
// The name in `newest`, "" where there is none or it is not a bare name.
std::string read_newest(Storage& storage, const std::string& path);

// Finishes or undoes what a dead save left, of full checkpoints too (full.h): .old where the name is missing or
// incomplete goes back, else is removed; .tmp-* and .gone-* are removed. Rank 0, before a save. Never touches a folder
// it doesn't know.
void recover(Storage& storage, const std::string& path);

// The way of step 5, for these folders of `path`: all lose their names, then their content. Where it fails or the
// machine dies, each folder has its name and is whole, or is a .gone-* that the next save's recover() removes.
void remove_checkpoints(Storage& storage, const std::string& path, const std::vector<std::string>& names);

// Removes complete partial checkpoints beyond the newest `keep`, never `just_saved`, never a folder without our
// manifest. Where `just_saved` is a full one (`newest` names it already), the partial one that a resume would take
// stays in any case. Returns the names removed.
std::vector<std::string> prune(Storage& storage, const std::string& path, int keep, const std::string& just_saved);

}  // namespace shardsmith
