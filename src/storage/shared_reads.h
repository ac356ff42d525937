// What several ranks of one machine read of the same files is read from the disk once.
//
// Each rank tells the blocks that its plan touches. Those that others on the machine touch too are read through the
// page cache, which is the channel: they are dealt out in parts, and the ranks begin with different ones, so that each
// brings a part from the disk while the others bring theirs, and finds those in memory when it comes to them. What one
// rank alone reads goes around the cache. Nobody waits for anybody: a rank that comes early reads for itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layout/plan.h"

namespace shardsmith {

class SharedReads {
 public:
  static constexpr uint64_t kBlock = 1 << 20;  // that of our checksums, which are checked block by block
  static constexpr uint64_t kPart = 64 << 20;  // bytes that a rank reads before it goes on to another's

  // What this rank tells the others of its plan, over `index`. `host`: the same on ranks of one machine. A bit a block.
  static std::string announce(const Plan& plan, const Index& index, const std::string& host);

  // Of all ranks what announce() has given them, by rank. Ranks that mean other files (their sizes differ) share
  // nothing. Throws kInvalidArgument for a message that is none.
  SharedReads(const std::vector<std::string>& announcements, int rank);

  // Whether another rank of this machine reads anything of the blocks that hold [begin, end) of a file.
  bool is_shared(uint32_t file, uint64_t begin, uint64_t end) const;
  // Where in this rank's order what begins at `offset`, in a shared block, comes.
  uint64_t turn(uint32_t file, uint64_t offset) const;

 private:
  std::vector<std::vector<bool>> shared_;     // by file and block: another one reads it too
  std::vector<std::vector<uint32_t>> place_;  // by file and block: which it is of all blocks that several read
  uint64_t ranks_ = 1;                        // that share anything with others on this machine
  uint64_t own_ = 0;                          // which of them this one is
};

}  // namespace shardsmith
