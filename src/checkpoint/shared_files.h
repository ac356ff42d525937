// Files that replicas hold alike: each writes a share of their blocks, and nothing is written twice.
//
// A rank announces a file with the fingerprint of its layout; those of one name and one fingerprint are one file. Its
// blocks of 1 MiB are dealt out so that all ranks come to write about as much, with what each writes alone counted in.
// Two machines never write one file, unless the storage says that they may: then those of the machine with the most
// holders write it. The checksums are exchanged, and the tail and what depends on others' checksums follow (pt_file.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/value.h"
#include "checkpoint/manifest.h"
#include "checkpoint/save.h"
#include "format/pt_file.h"
#include "layout/share.h"
#include "storage/storage.h"

namespace shardsmith {

class SharedFiles {
 public:
  // `files` must outlive this.
  explicit SharedFiles(const std::vector<SaveFile>& files);

  // Of file `number`, into its entry of the announcement; nothing where it is not shared.
  void announce(size_t number, Value& entry) const;

  // Who writes what, the same on all ranks. `entries`: of each rank its files' entries ("name", "bytes", and what
  // announce() has set); `hosts`: where each runs. Throws kInvalidArgument, by fail_differing, for a name that stands
  // twice and is not shared by both. Replicas whose layouts differ don't share: the first one's file counts, and
  // `warnings` gets a line.
  void plan(const std::vector<List>& entries, const std::vector<std::string>& hosts, int rank, bool across_hosts,
            std::vector<std::string>& warnings);
  // Whether there is any file, on any rank, that several write.
  bool any() const { return any_; }
  // Whether this rank writes file `number` alone; otherwise it is a shared one, or another's.
  bool is_own(size_t number) const { return own_[number]; }
  uint64_t bytes() const { return bytes_; }  // of all files, generously

  // Rank 0: makes those that several write.
  void create(Storage& storage, const std::string& folder) const;
  // This rank's blocks. Returns the checksums, by file.
  Value write(Storage& storage, const std::string& folder, const Progress& progress);
  // With what write() has returned on all ranks: the rest of the bytes, synced. Returns the entries of the manifest for
  // the files whose tail this rank has written.
  List finish(const std::vector<Value>& written, const std::string& save_id);

 private:
  struct File {
    std::string name;
    uint64_t size = 0;
    std::vector<Share> shares;         // of the file's blocks
    std::unique_ptr<PtFile> layout;    // where this rank holds the file
    const SaveFile* file = nullptr;    // likewise
    std::unique_ptr<PtRanges> ranges;  // where it writes
    std::unique_ptr<WriteFile> out;
  };

  const std::vector<SaveFile>& files_;
  std::vector<std::unique_ptr<PtFile>> layouts_;  // by number; null for files that are not shared
  std::vector<bool> own_;
  std::vector<File> split_;  // those that several write, of all ranks
  bool any_ = false;
  int rank_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace shardsmith
