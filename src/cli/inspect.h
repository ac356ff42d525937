// What an Index holds, in sums.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "layout/index.h"

namespace shardsmith::cli {

struct Total {
  int64_t tensors = 0, elements = 0;
  uint64_t bytes = 0;
};
using Totals = std::map<std::string, Total>;

struct Sums {
  Totals by_dtype, by_prefix;
  Total all;
};

// Second names are counted once. `depth`: parts of a name that make its prefix.
Sums sum(const Index& index, size_t depth);

// The first `depth` parts of a name, without its last one: "model/transformer", "model.layers"; "(top)" where it has
// one part only.
std::string prefix_of(const std::string& name, size_t depth);

// Bytes of all its elements, once.
uint64_t bytes_of(const TensorEntry& tensor);

// Where the last of several slices is shorter than the others, each rank holds as much as the first: "30 of 44 rows",
// or
// "" where nothing is padded.
std::string padding_of(const TensorEntry& tensor);

}  // namespace shardsmith::cli
