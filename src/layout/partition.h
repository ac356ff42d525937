// Which blocks go to which pipeline stage. Pure.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/value.h"

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
// kInvalidArgument that names both numbers if there are fewer blocks than stages. About blocks^2 x log(stages) work
// where the blocks cost alike: 1,000 blocks take milliseconds.
Partition make_partition(const PartitionCosts& costs, int stages);

// Throws kInvalidArgument unless `partition` lays `blocks` blocks over at least one stage and each stage has a block.
void require_sound(const Partition& partition, int blocks);

// The costliest stage's share, 1 / stages at best: balance = mean / max in (0, 1].
double balance(const PartitionCosts& costs, const Partition& partition);

// A parameter (dotted path) and where in the model it stands: -1 the embedding, 0 to blocks - 1 a block, blocks the
// final norm and the head.
struct PlacedName {
  std::string name;
  int place = 0;
};
// "The module `path` (dotted; "" is the whole model) goes to `stage`." The innermost wish around a parameter counts.
struct PartitionWish {
  std::string path;
  int stage = 0;
};
// The partition that somebody wishes for. Blocks outside every wish go to `default_stage`; an embedding and a head that
// nobody places go to the first and the last stage, where they belong. Of several wishes for one path the last counts;
// a path without parameters changes nothing. Throws kInvalidArgument that names the module where a stage is out of
// range or gets no block, a block is torn apart, blocks don't follow each other in the order of the stages, or somebody
// places embedding or head elsewhere.
Partition manual_partition(std::span<const PlacedName> names, int blocks, int stages,
                           std::span<const PartitionWish> wishes, int default_stage);

// A decision as it is kept in a file: {"layers": 4, "stages": 2, "partition": [0, 1, 4]}.
Value partition_value(const Partition& partition);
// Back, for a model of `blocks` layers over `stages` stages. `where` names the source in errors. Throws kCorrupt for
// what is no partition, kInvalidArgument for one of another model or another number of stages.
Partition partition_from(const Value& decision, int blocks, int stages, const std::string& where);

}  // namespace shardsmith
