// A copy of what is to be saved, so that training can go on while it is written: one buffer, allocated once and reused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "format/pt.h"

namespace shardsmith {

// Anonymous memory that only grows, in huge pages where the machine has them. One thread.
class SnapshotBuffer {
 public:
  SnapshotBuffer() = default;
  ~SnapshotBuffer();
  SnapshotBuffer(const SnapshotBuffer&) = delete;
  // At least `size` bytes; what was in it is lost where it grows. Throws std::bad_alloc.
  std::byte* reserve(uint64_t size);
  uint64_t capacity() const { return capacity_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t capacity_ = 0;
};

// Bytes that take_snapshot() needs of a buffer: each storage once, however many of the contents have it.
uint64_t snapshot_bytes(const std::vector<const PtContent*>& contents);

// Copies the contents' storages into `buffer` with two threads and lets the contents point there. Sources that are
// functions are called by this thread. What they throw is passed on; the contents are then as before.
void take_snapshot(const std::vector<PtContent*>& contents, SnapshotBuffer& buffer);

}  // namespace shardsmith
