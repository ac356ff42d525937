#include "layout/range.h"

#include <algorithm>

namespace shardsmith {
namespace {

// Elements [begin, end) of the part of the tensor where the first `fixed.size()` coordinates are `fixed`.
void add_boxes(const Shape& shape, Shape& fixed, int64_t begin, int64_t end, std::vector<Box>& out) {
  if (begin == end) return;
  const size_t d = fixed.size();
  const auto emit = [&](int64_t first, int64_t count) {
    Box box;
    box.offset = fixed;
    box.extent.assign(d, 1);
    if (d < shape.size()) {
      box.offset.push_back(first);
      box.extent.push_back(count);
      for (size_t k = d + 1; k < shape.size(); ++k) {
        box.offset.push_back(0);
        box.extent.push_back(shape[k]);
      }
    }
    out.push_back(std::move(box));
  };
  if (d == shape.size()) return emit(0, 1);
  int64_t row = 1;  // elements of one step along dimension d
  for (size_t k = d + 1; k < shape.size(); ++k) row *= shape[k];
  const auto inside_row = [&](int64_t index, int64_t from, int64_t to) {
    fixed.push_back(index);
    add_boxes(shape, fixed, from, to, out);
    fixed.pop_back();
  };
  int64_t first = begin / row;
  const int64_t last = end / row;
  if (begin % row != 0) {
    const int64_t stop = std::min(end, (first + 1) * row);
    inside_row(first, begin % row, stop - first * row);
    if (stop == end) return;
    ++first;
  }
  if (last > first) emit(first, last - first);
  if (end % row != 0) inside_row(last, 0, end % row);
}

}  // namespace

std::vector<Box> boxes_of_range(const Shape& shape, int64_t begin, int64_t end) {
  std::vector<Box> boxes;
  Shape fixed;
  add_boxes(shape, fixed, begin, end, boxes);
  return boxes;
}

}  // namespace shardsmith
