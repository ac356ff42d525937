// Which blocks go to which pipeline stage. Pure.
#pragma once

#include <string>
#include <vector>

namespace shardsmith {

// stage s holds blocks [first[s], first[s + 1]); first.size() == stages + 1.
// The embedding belongs to stage 0, the final norm and the head to the last.
struct Partition {
  std::vector<int> first;
  int stages() const { return static_cast<int>(first.size()) - 1; }
  bool operator==(const Partition&) const = default;
};

struct PartitionCosts {
  double embedding = 0;        // any unit, the same for all
  std::vector<double> blocks;  // one a block
  double head = 0;             // final norm, head and loss
};

// The contiguous partition whose costliest stage is cheapest; among equals the one with the smallest
// sum of squares. Each block lands exactly once, each stage gets at least one block. Throws
// kInvalidArgument that names both numbers if there are fewer blocks than stages.
Partition make_partition(const PartitionCosts& costs, int stages);

// The costliest stage's share, 1 / stages at best: balance = mean / max in (0, 1].
double balance(const PartitionCosts& costs, const Partition& partition);

}  // namespace shardsmith
