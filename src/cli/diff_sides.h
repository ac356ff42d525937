// Both sides of a comparison under the same names.
#pragma once

#include <string>
#include <vector>

#include "base/value.h"
#include "cli/source.h"
#include "layout/index.h"

namespace shardsmith::cli {

struct Sides {
  Index a, b;  // tensors; no values
  Value a_values, b_values;
  bool values = false;                // they can be compared
  bool ties_may_be_left_out = false;  // second names stand in one form of a model and not in the other
  std::vector<std::string> notices;
};

// Two of one format are taken whole; otherwise it is their weights: under Hugging Face's names where only one has ours.
Sides make_sides(const Source& a, const Source& b, bool weights_only);

}  // namespace shardsmith::cli
