#include "storage/block_ledger.h"

#include <algorithm>

#include "base/checksum.h"
#include "base/error.h"

namespace shardsmith {

const BlockChecksums* BlockLedger::checksums_of(uint32_t file) const {
  const BlockChecksums* sums = file < files_.size() ? files_[file].checksums.get() : nullptr;
  if (!sums) return nullptr;
  if (sums->block_size == 0 || sums->covered > files_[file].size ||
      sums->crc.size() != (sums->covered + sums->block_size - 1) / sums->block_size)
    fail(ErrorKind::kCorrupt, files_[file].path, ": its list of block checksums doesn't fit the file");
  return sums;
}

BlockLedger::Block BlockLedger::block_of(const BlockChecksums& sums, uint64_t number) const {
  const uint64_t begin = number * sums.block_size;
  return {begin, std::min(begin + sums.block_size, sums.covered)};
}

void BlockLedger::see(uint32_t file, uint64_t begin, std::span<const std::byte> bytes) {
  const BlockChecksums* sums = checksums_of(file);
  if (!sums) return;
  const uint64_t end = std::min(begin + bytes.size(), sums->covered);
  for (uint64_t at = begin; at < end;) {
    const uint64_t number = at / sums->block_size;
    const Block block = block_of(*sums, number);
    const uint64_t stop = std::min(end, block.end);
    for (const auto& [first, last] : unseen(file, number, at, stop)) {
      const auto part = bytes.subspan(static_cast<size_t>(first - begin), static_cast<size_t>(last - first));
      const uint32_t crc = crc32(part);
      if (first == block.begin && last == block.end)
        compare(file, *sums, number, crc);
      else
        add(file, *sums, number, first, {last - first, crc});
    }
    at = stop;
  }
}

std::vector<std::pair<uint64_t, uint64_t>> BlockLedger::unseen(uint32_t file, uint64_t number, uint64_t begin,
                                                               uint64_t end) {
  std::vector<std::pair<uint64_t, uint64_t>> holes;
  std::lock_guard lock(mutex_);
  if (const auto sound = sound_.find(file); sound != sound_.end() && sound->second[static_cast<size_t>(number)])
    return {};
  const auto found = begun_.find({file, number});
  if (found == begun_.end()) return {{begin, end}};
  const Pieces& pieces = found->second;
  auto piece = pieces.upper_bound(begin);
  if (piece != pieces.begin()) {
    const auto before = std::prev(piece);
    begin = std::max(begin, before->first + before->second.length);
  }
  for (; begin < end; ++piece) {
    const uint64_t stop = piece == pieces.end() ? end : std::min(end, piece->first);
    if (begin < stop) holes.emplace_back(begin, stop);
    if (piece == pieces.end()) break;
    begin = piece->first + piece->second.length;
  }
  return holes;
}

bool BlockLedger::add(uint32_t file, const BlockChecksums& sums, uint64_t number, uint64_t begin, Piece piece) {
  const Block block = block_of(sums, number);
  uint32_t crc = 0;
  {
    std::lock_guard lock(mutex_);
    Pieces& pieces = begun_[{file, number}];
    // Another thread has seen some of it meanwhile; finish() reads what is then still open.
    const auto after = pieces.lower_bound(begin);
    const bool overlaps =
        (after != pieces.end() && after->first < begin + piece.length) ||
        (after != pieces.begin() && std::prev(after)->first + std::prev(after)->second.length > begin);
    if (overlaps) return false;
    pieces.emplace(begin, piece);
    uint64_t at = block.begin;
    for (const auto& [first, known] : pieces) {
      if (first != at) return false;
      crc = crc32_combine(crc, known.crc, known.length);
      at += known.length;
    }
    if (at != block.end) return false;
    begun_.erase({file, number});
  }
  compare(file, sums, number, crc);
  return true;
}

void BlockLedger::compare(uint32_t file, const BlockChecksums& sums, uint64_t number, uint32_t crc) {
  if (crc == sums.crc[static_cast<size_t>(number)]) {
    std::lock_guard lock(mutex_);
    std::vector<bool>& sound = sound_[file];
    sound.resize(sums.crc.size());
    sound[static_cast<size_t>(number)] = true;
    return;
  }
  const Block block = block_of(sums, number);
  fail(ErrorKind::kCorrupt, files_[file].path, ": damaged: bytes ", block.begin, " to ", block.end,
       " don't match their checksum; they hold ", names_ ? names_(file, block.begin, block.end) : "tensors");
}

uint64_t BlockLedger::finish(Storage& storage) {
  uint64_t read = 0;
  std::unique_ptr<ReadFile> open;
  uint32_t opened = 0;
  std::vector<std::byte> buffer;
  while (!begun_.empty()) {
    const auto [file, number] = begun_.begin()->first;
    const BlockChecksums& sums = *checksums_of(file);
    const Block block = block_of(sums, number);
    // The first hole; add() drops the block when the last one is filled.
    const Pieces& pieces = begun_.begin()->second;
    uint64_t begin = block.begin;
    auto piece = pieces.begin();
    for (; piece != pieces.end() && piece->first == begin; ++piece) begin += piece->second.length;
    const uint64_t end = piece == pieces.end() ? block.end : piece->first;
    if (!open || opened != file) open = storage.open_read(files_[file].path);
    opened = file;
    buffer.resize(static_cast<size_t>(end - begin));
    open->read(begin, buffer);
    read += buffer.size();
    add(file, sums, number, begin, {buffer.size(), crc32(buffer)});
  }
  return read;
}

}  // namespace shardsmith
