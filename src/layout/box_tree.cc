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
  build(0, 0, order_.size());
}

void BoxTree::build(size_t node, size_t begin, size_t end) {
  // The dimension along which the most boxes lie side by side is cut: extent of all over mean extent of one.
  size_t best = 0;
  double best_count = -1;
  for (size_t d = 0; d < rank_; ++d) {
    int64_t low = std::numeric_limits<int64_t>::max(), high = std::numeric_limits<int64_t>::min();
    double extents = 0;
    for (size_t i = begin; i < end; ++i) {
      const Box& box = slices_[order_[i]].box;
      low = std::min(low, box.offset[d]);
      high = std::max(high, box.offset[d] + box.extent[d]);
      extents += static_cast<double>(box.extent[d]);
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
    std::nth_element(at(begin), at(middle), at(end),
                     [&](size_t a, size_t b) { return slices_[a].box.offset[best] < slices_[b].box.offset[best]; });
  }
  build(2 * node + 1, begin, middle);
  build(2 * node + 2, middle, end);
}

}  // namespace shardsmith
