// A file's bytes in large direct reads on several threads: while one looks at its bytes the others read.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "storage/storage.h"

namespace shardsmith {

// Owns the buffers, which are kept from one file to the next. One read() at a time.
class ParallelReader {
 public:
  // `unit`: bytes of one read, a multiple of 4096.
  ParallelReader(int threads, uint64_t unit);

  // Calls look(offset, bytes) for each stretch of [begin, end), on whatever thread has read it and in any order.
  // Stretches meet at multiples of `unit`, counted from the page that holds `begin`. Throws the first error of a read,
  // or of `look`, in the order of the bytes.
  using Look = std::function<void(uint64_t offset, std::span<const std::byte> bytes)>;
  void read(ReadFile& file, uint64_t begin, uint64_t end, const Look& look);

  uint64_t unit() const { return unit_; }

 private:
  const uint64_t unit_;
  const size_t threads_;
  std::vector<AlignedBuffer> buffers_;
};

}  // namespace shardsmith
