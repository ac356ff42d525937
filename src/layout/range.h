// Ranges of row-major elements as boxes: how a piece of a flattened tensor, or of a file, is a piece of the tensor.
// Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/box.h"

namespace shardsmith {

// The boxes that hold exactly the elements [begin, end) of a packed row-major tensor, in their order there: at most
// 2 * rank - 1 of them. Requires 0 <= begin <= end <= volume(shape).
std::vector<Box> boxes_of_range(const Shape& shape, int64_t begin, int64_t end);

}  // namespace shardsmith
