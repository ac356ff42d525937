// Which of many boxes share elements with a given one? A balanced tree of bounding boxes, built once:
// n log n to build, log n + hits for a look-up among boxes that don't overlap, so that a tensor in a
// million slices is still planned and checked in seconds. Thread-safe once built.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/index.h"

namespace shardsmith {

class BoxTree {
 public:
  // `slices` must outlive the tree; all boxes have the same rank. Empty boxes are never found.
  explicit BoxTree(const std::vector<Slice>& slices);

  // Calls visit(i) for every slice i whose box shares an element with `box`; stops when visit returns false.
  template <typename Visit>
  void find(const Box& box, Visit&& visit) const {
    if (!order_.empty()) find_in(0, 0, order_.size(), box, visit);
  }

 private:
  static constexpr size_t kLeaf = 8;

  void build(size_t node, size_t begin, size_t end);
  bool touches(size_t node, const Box& box) const {
    const int64_t* low = &bounds_[node * 2 * rank_];
    const int64_t* high = low + rank_;
    for (size_t d = 0; d < rank_; ++d) {
      if (box.offset[d] >= high[d] || box.offset[d] + box.extent[d] <= low[d]) return false;
    }
    return true;
  }
  template <typename Visit>
  bool find_in(size_t node, size_t begin, size_t end, const Box& box, Visit& visit) const {
    if (rank_ > 0 && !touches(node, box)) return true;
    if (end - begin <= kLeaf) {
      for (size_t i = begin; i < end; ++i) {
        if (share(slices_[order_[i]].box, box) && !visit(order_[i])) return false;
      }
      return true;
    }
    const size_t middle = begin + (end - begin) / 2;
    return find_in(2 * node + 1, begin, middle, box, visit) && find_in(2 * node + 2, middle, end, box, visit);
  }
  static bool share(const Box& a, const Box& b) {
    for (size_t d = 0; d < a.offset.size(); ++d) {
      if (a.offset[d] >= b.offset[d] + b.extent[d] || b.offset[d] >= a.offset[d] + a.extent[d]) return false;
    }
    return true;
  }

  const std::vector<Slice>& slices_;
  size_t rank_ = 0;
  std::vector<size_t> order_;
  std::vector<int64_t> bounds_;   // a node: its low corner, then its high corner
  std::vector<int64_t> corners_;  // while it is built: of each slice, begin and end in each dimension
};

}  // namespace shardsmith
