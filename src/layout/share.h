// Who writes which blocks: shares of equal load, each block once. Pure.
#pragma once

#include <cstdint>
#include <vector>

namespace shardsmith {

// Neighbouring blocks that each of `ranks` (ascending, not empty) may write.
struct Stretch {
  uint64_t blocks = 0;
  std::vector<int> ranks;
};

// Blocks [begin, end), counted through all stretches.
struct Share {
  uint64_t begin = 0, end = 0;
  int rank = 0;
  bool operator==(const Share&) const = default;
};

// Stretch by stretch, each rank gets one run of its blocks, so many that loads become as equal as they can; `load`
// (blocks by rank, what each has already) is added to. Shares come in the order of the blocks; neighbours of one rank
// are joined. The same input gives the same shares, on every rank.
std::vector<Share> share_out(const std::vector<Stretch>& stretches, std::vector<uint64_t>& load);

}  // namespace shardsmith
