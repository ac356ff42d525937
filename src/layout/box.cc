#include "layout/box.h"

#include <algorithm>
#include <cassert>

#include "base/error.h"

namespace shardsmith {

int64_t volume(const Shape& extent) {
  int64_t product = 1;
  bool empty = false;
  // A zero hides nothing: the other extents must be sound too, and their product is then 0 whatever they are.
  for (int64_t e : extent) {
    if (e < 0) fail(ErrorKind::kCorrupt, "shape ", to_string(extent), " has a negative dimension");
    if (e == 0) empty = true;
  }
  if (empty) return 0;
  for (int64_t e : extent) {
    if (__builtin_mul_overflow(product, e, &product)) {
      fail(ErrorKind::kCorrupt, "shape ", to_string(extent), " has more elements than 63 bits can count");
    }
  }
  return product;
}

Box whole(const Shape& shape) { return Box{Shape(shape.size(), 0), shape}; }

Strides contiguous_strides(const Shape& shape) {
  Strides strides(shape.size());
  int64_t step = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = step;
    // Beyond 63 bits only in a tensor without elements, where no stride is ever taken.
    if (__builtin_mul_overflow(step, std::max<int64_t>(shape[d], 1), &step)) step = INT64_MAX;
  }
  return strides;
}

bool inside(const Box& inner, const Shape& shape) {
  if (inner.offset.size() != shape.size() || inner.extent.size() != shape.size()) return false;
  for (size_t d = 0; d < shape.size(); ++d) {
    int64_t end = 0;
    if (inner.offset[d] < 0 || inner.extent[d] < 0) return false;
    if (__builtin_add_overflow(inner.offset[d], inner.extent[d], &end) || end > shape[d]) return false;
  }
  return true;
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  assert(a.offset.size() == b.offset.size());
  Box both;
  both.offset.reserve(a.offset.size());
  both.extent.reserve(a.offset.size());
  for (size_t d = 0; d < a.offset.size(); ++d) {
    const int64_t begin = std::max(a.offset[d], b.offset[d]);
    const int64_t end = std::min(a.offset[d] + a.extent[d], b.offset[d] + b.extent[d]);
    if (begin >= end) return std::nullopt;
    both.offset.push_back(begin);
    both.extent.push_back(end - begin);
  }
  return both;
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (size_t d = 0; d < shape.size(); ++d) text += (d ? ", " : "") + std::to_string(shape[d]);
  return text + "]";
}

std::string to_string(const Box& box) {
  std::string text = "[";
  for (size_t d = 0; d < box.offset.size(); ++d) {
    const int64_t extent = d < box.extent.size() ? box.extent[d] : 0;
    int64_t end = 0;  // a box that is shown may be one that is wrong
    const bool overflow = __builtin_add_overflow(box.offset[d], extent, &end);
    text += str(d ? ", " : "", box.offset[d], ":");
    text += overflow ? str(box.offset[d], extent < 0 ? "" : "+", extent) : str(end);
  }
  return text + "]";
}

}  // namespace shardsmith
