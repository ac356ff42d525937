// Executing a Plan: large sequential reads into a fixed budget of buffers, checksums while the
// bytes are in cache, strided copies out.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "base/progress.h"
#include "layout/plan.h"
#include "storage/block_ledger.h"
#include "storage/shared_reads.h"
#include "storage/storage.h"

namespace shardsmith {

// Reading buffers that are kept from one execute() to the next, for one execute() at a time.
class TransferBuffers {
 public:
  // At least `size` bytes.
  AlignedBuffer take(uint64_t size);
  void give_back(AlignedBuffer buffer);
  // Of files, by all transfers that used these buffers.
  uint64_t bytes_read() const { return bytes_read_; }
  void count(uint64_t bytes) { bytes_read_ += bytes; }

 private:
  std::atomic<uint64_t> bytes_read_{0};
  std::mutex mutex_;
  std::vector<AlignedBuffer> free_;
};

struct TransferOptions {
  uint64_t budget = 64 << 20;  // bytes of buffers, allocated once
  int threads = 2;             // readers; 1 = everything on the calling thread
  bool check = true;           // verify the block checksums that a read covers (blocks are read whole)
  Progress progress;
  TransferBuffers* buffers = nullptr;  // otherwise allocated anew
  // Several transfers that together read most of a file: blocks are checked by it, in pieces, and none is read whole
  // for its check alone. The caller ends with BlockLedger::finish.
  BlockLedger* ledger = nullptr;
  const SharedReads* shared = nullptr;  // what other ranks of this machine read at the same time
};

// Where a Want's buffer lives. Must be valid until the call returns.
struct Destination {
  std::span<std::byte> bytes;
};

// Moves all bytes of `plan` (made over `index`) into `destinations[Want::buffer]`. Throws kCorrupt
// that names file and tensor where a checksum differs, kIo where a read fails; destinations are then
// partly written. Casts between floating dtypes round to nearest even.
void execute(const Plan& plan, const Index& index, std::span<const Destination> destinations, Storage& storage,
             const TransferOptions& options = {});

// One strided copy, from the bytes of its read. Exposed for writers that stream.
void run_copy(const Copy& copy, std::span<const std::byte> source, std::span<std::byte> destination);

}  // namespace shardsmith
