// What two checkpoints or models differ in, whatever their formats and layouts.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/progress.h"
#include "base/value.h"
#include "cli/diff_elements.h"
#include "cli/diff_values.h"
#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith::cli {

struct DiffOptions {
  Tolerance tolerance;
  bool ignore_dtype = false;
  bool weights_only = false;
  std::vector<std::string> include, exclude;  // globs over names; `*` matches any character
  uint64_t memory = 256 << 20;
  int threads = 2;
  Progress progress;
  std::function<void(std::string_view)> notice;  // as in StreamOptions
};

struct TensorSide {
  Dtype dtype = Dtype::kF32;
  Shape shape;
};

struct TensorDifference {
  std::string name;
  std::optional<TensorSide> a, b;  // nothing where the side lacks it
  int64_t elements = 0;            // of one side; compared where the shapes are the same
  int64_t differing = 0;
  double largest = 0;  // absolute; infinite where one of the numbers is not finite
  Shape where;         // its place
  std::string a_element, b_element;
  bool different(bool ignore_dtype) const;
};

struct DiffResult {
  std::vector<TensorDifference> tensors;  // only those that differ
  size_t tensors_compared = 0;            // whose elements were
  size_t all_tensors = 0;                 // names on either side
  int64_t elements = 0;
  ValueComparison values;
  std::vector<std::string> notices;  // one line each: what was not compared, or under which names
  bool equal() const { return tensors.empty() && values.differing == 0; }
};

// Reads both in windows; needs options.memory, whatever their sizes.
DiffResult diff(Storage& storage, const std::string& a, const std::string& b, const DiffOptions& options);

}  // namespace shardsmith::cli
