// Steps 2 to 4 of a full checkpoint's commit (full.h), and what undoes a dead one. Rank 0 only. Not thread-safe.
#pragma once

#include <string>
#include <vector>

#include "storage/storage.h"

namespace shardsmith {

class FullPublication {
 public:
  // `path`: the weights' file to be; `folder`: the temporary folder that holds the new files, synced; `names`: theirs,
  // the weights last. Throws after having put everything back as far as the storage lets it.
  FullPublication(Storage& storage, const std::string& path, const std::string& folder,
                  const std::vector<std::string>& names);
  // As before; the new files are in `folder` again. Never throws: what can't be put back now, recover_full() puts back.
  void undo() noexcept;
  // Step 4. A line for each thing that could not be removed.
  std::vector<std::string> finish();

 private:
  Storage& storage_;
  std::string path_, folder_, old_;
  std::vector<std::string> moved_, named_;  // the old files' paths, the new ones' names
};

}  // namespace shardsmith
