// Boxes: axis-aligned pieces of a tensor. Pure values; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardsmith {

using Shape = std::vector<int64_t>;
using Strides = std::vector<int64_t>;  // in elements, one a dimension

// Elements with offset[d] <= i[d] < offset[d] + extent[d]. Rank 0 is one element.
struct Box {
  Shape offset;
  Shape extent;
  bool operator==(const Box&) const = default;
};

// Number of elements; throws Error(kCorrupt) on a negative extent or when 63 bits don't hold it.
int64_t volume(const Shape& extent);
Box whole(const Shape& shape);
// Row-major strides of a packed tensor.
Strides contiguous_strides(const Shape& shape);
bool inside(const Box& inner, const Shape& shape);
// Nothing where they share no element. Boxes must have the same rank.
std::optional<Box> intersect(const Box& a, const Box& b);
std::string to_string(const Shape& shape);  // "[2, 3]"
std::string to_string(const Box& box);      // "[0:2, 3:5]"

}  // namespace shardsmith
