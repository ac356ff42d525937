#include "layout/box_tree.h"

#include <algorithm>
#include <limits>

namespace shardsmith {

BoxTree::BoxTree(const std::vector<Slice>& slices) : slices_(slices) {
  order_.reserve(slices.size());
  for (size_t i = 0; i < slices.size(); ++i) {
    const Shape& extent = slices[i].box.extent;
    if (std::none_of(extent.begin(), extent.end(), [](int64_t e) { return e == 0; })) order_.push_back(i);
  }
  if (order_.empty()) return;
  rank_ = slices[order_[0]].box.offset.size();
  size_t nodes = 1;
  for (size_t leaf = order_.size(); leaf > kLeaf; leaf = (leaf + 1) / 2) nodes = 2 * nodes + 1;
  bounds_.resize(nodes * 2 * rank_);
  // The boxes side by side in memory: building walks over all of them once a level.
  corners_.reserve(slices.size() * 2 * rank_);
  for (const Slice& slice : slices) {
    for (size_t d = 0; d < rank_; ++d) {
      corners_.push_back(slice.box.offset[d]);
      corners_.push_back(slice.box.offset[d] + slice.box.extent[d]);
    }
  }
  build(0, 0, order_.size());
  std::vector<int64_t>().swap(corners_);
}

void BoxTree::build(size_t node, size_t begin, size_t end) {
  // The dimension along which the most boxes lie side by side is cut: extent of all over mean extent of one.
  size_t best = 0;
  double best_count = -1;
  for (size_t d = 0; d < rank_; ++d) {
    int64_t low = std::numeric_limits<int64_t>::max(), high = std::numeric_limits<int64_t>::min();
    double extents = 0;
    for (size_t i = begin; i < end; ++i) {
      const int64_t* corner = &corners_[(order_[i] * rank_ + d) * 2];
      low = std::min(low, corner[0]);
      high = std::max(high, corner[1]);
      extents += static_cast<double>(corner[1] - corner[0]);
    }
    bounds_[node * 2 * rank_ + d] = low;
    bounds_[node * 2 * rank_ + rank_ + d] = high;
    const double count = static_cast<double>(high - low) * static_cast<double>(end - begin) / extents;
    if (count > best_count) best_count = count, best = d;
  }
  if (end - begin <= kLeaf) return;
  const size_t middle = begin + (end - begin) / 2;
  if (rank_ > 0) {
    const auto at = [this](size_t i) { return order_.begin() + static_cast<std::ptrdiff_t>(i); };
    const auto key = [&](size_t i) { return corners_[(i * rank_ + best) * 2]; };
    std::nth_element(at(begin), at(middle), at(end), [&](size_t a, size_t b) { return key(a) < key(b); });
  }
  build(2 * node + 1, begin, middle);
  build(2 * node + 2, middle, end);
}

}  // namespace shardsmith
