// Block checksums of files that are read piece by piece, by one transfer after another: each piece is summed as it goes
// by, and a block is compared once all of it was seen. So nothing is read twice for the sake of a check.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith {

class BlockLedger {
 public:
  // For messages: the tensors with an element in bytes [begin, end) of a file.
  using Names = std::function<std::string(uint32_t file, uint64_t begin, uint64_t end)>;

  // `files` must outlive it. Those without checksums are not looked at.
  BlockLedger(const std::vector<FileEntry>& files, Names names) : files_(files), names_(std::move(names)) {}

  // Bytes of a file from `begin` on. Throws kCorrupt that names file and tensors where a block doesn't match. Any
  // thread.
  void see(uint32_t file, uint64_t begin, std::span<const std::byte> bytes);

  // Reads what nobody has seen of the blocks that were begun, and compares them. Returns the bytes read.
  uint64_t finish(Storage& storage);

 private:
  struct Piece {
    uint64_t length = 0;
    uint32_t crc = 0;
  };
  using Pieces = std::map<uint64_t, Piece>;  // by their first byte; they don't overlap
  struct Block {
    uint64_t begin = 0, end = 0;
  };
  const BlockChecksums* checksums_of(uint32_t file) const;
  Block block_of(const BlockChecksums& sums, uint64_t number) const;
  // What of [begin, end) no piece of the block covers.
  std::vector<std::pair<uint64_t, uint64_t>> unseen(uint32_t file, uint64_t number, uint64_t begin, uint64_t end);
  // Whether the block is complete now, and is dropped.
  bool add(uint32_t file, const BlockChecksums& sums, uint64_t number, uint64_t begin, Piece piece);
  void compare(uint32_t file, const BlockChecksums& sums, uint64_t number, uint32_t crc);

  const std::vector<FileEntry>& files_;
  Names names_;
  std::mutex mutex_;
  std::map<std::pair<uint32_t, uint64_t>, Pieces> begun_;
  std::map<uint32_t, std::vector<bool>> sound_;  // blocks that were compared
};

}  // namespace shardsmith
