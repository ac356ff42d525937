// Every byte of a checkpoint's files against its checksums. Reads overlap with the checksums of what was read before.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "checkpoint/manifest.h"
#include "layout/index.h"
#include "storage/parallel_read.h"
#include "storage/storage.h"

namespace shardsmith {

// Bytes of one read by those who verify: enough for the disk, little enough for the cache.
inline constexpr uint64_t kVerifyUnit = 4 << 20;

// The tensors with an element in bytes [begin, end) of file `number`, a few of them by name: for messages.
std::string tensors_in(const Index& index, uint32_t number, uint64_t begin, uint64_t end);

struct VerifyOptions {
  int threads = 2;
  Progress progress;
};

// Full verification: every block of every file against its checksum. Returns one line per damage found (naming file,
// block range and the tensors it touches); empty = sound.
std::vector<std::string> verify_partial(Storage& storage, const std::string& folder, const Manifest& manifest,
                                        const VerifyOptions& options);

// The blocks of one file, neighbouring damage in one line. `index`, if there, says which tensors lie in file `number`.
// `done` is called with bytes, one call at a time.
std::vector<std::string> verify_blocks(Storage& storage, const std::string& path, const BlockChecksums& sums,
                                       const Index* index, uint32_t number, ParallelReader& reader,
                                       const std::function<void(uint64_t)>& done);

}  // namespace shardsmith
