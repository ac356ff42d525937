// The elements of tensors, a bounded number of bytes at a time: the same box of one tensor from one or several indexes
// at once, whatever their layouts. What diff compares and verify counts comes from here.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/progress.h"
#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith::cli {

// One tensor's entry in each index: of one shape, none of them an alias.
struct StreamedTensor {
  std::vector<const TensorEntry*> sides;
};

struct StreamedBox {
  size_t tensor = 0;  // which of the list
  Box box;
  int64_t repeats = 1;  // so many boxes like this one are there, all of the same bytes (strides of 0); seen once
  std::vector<std::span<const std::byte>> sides;  // packed row-major, little-endian, each in its own dtype
};

struct StreamOptions {
  uint64_t memory = 256 << 20;  // in all
  int threads = 2;
  bool check = true;  // block checksums
  std::string what;   // for progress
  Progress progress;
  std::function<void(std::string_view)> notice;  // told beforehand what a large one will read, and in how much memory
};
inline constexpr uint64_t kLeastStreamMemory = 32 << 20;

// Calls `visit` for boxes that together are all elements of all tensors, tensors in the order of the list, on the
// calling thread; meanwhile the next ones are read. Throws kInvalidArgument for less memory than kLeastStreamMemory,
// kUnsupported for a tensor whose strides show few bytes so often that looking at all of it would not end.
void stream_values(const std::vector<const Index*>& indexes, const std::vector<StreamedTensor>& tensors,
                   Storage& storage, const StreamOptions& options,
                   const std::function<void(const StreamedBox&)>& visit);

// The place of a tensor's first byte, to read in the order of the files.
std::pair<uint32_t, uint64_t> file_place(const TensorEntry& tensor);

// Cuts a shape into boxes of at most `most` elements (at least one), one after another. Along `first` as far as
// that suffices, then along the other dimensions, outermost first.
class BoxCutter {
 public:
  BoxCutter(Shape shape, int64_t most, size_t first = 0);
  // False at the end.
  bool next(Box& box);

 private:
  Shape shape_;
  std::vector<size_t> order_;  // dimensions that are cut: single indices of all but the last, runs of that one
  int64_t rows_ = 1;           // of the last
  Box at_;
  bool more_ = true;
};

}  // namespace shardsmith::cli
