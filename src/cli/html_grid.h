// Which rank holds how much of which layer: the picture of the page.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cli/source.h"

namespace shardsmith::cli {

struct GridCell {
  uint64_t bytes = 0;
  std::vector<const TensorEntry*> tensors;
};

// Rows: of a partial checkpoint the (stage, tensor-parallel slice) pairs with their ranks, otherwise the files.
// Columns: embedding, layers by their numbers, norm and head, other.
struct Grid {
  std::vector<std::string> rows, columns;
  std::vector<std::string> row_titles, column_titles;
  std::vector<std::map<size_t, GridCell>> cells;  // by row, then by column
  uint64_t largest = 0;                           // bytes of one cell
};

Grid make_grid(const Source& source);

}  // namespace shardsmith::cli
