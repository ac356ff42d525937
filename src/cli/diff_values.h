// Differences of plain values: counters, options, user content, configurations.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/value.h"
#include "cli/diff_elements.h"
#include "cli/source.h"

namespace shardsmith::cli {

struct ValueDifference {
  std::string path;  // flat spelling, see base/value.h
  std::string a, b;  // one line each; "" on the side that lacks it
};

struct ValueComparison {
  size_t compared = 0;  // leaves
  size_t differing = 0;
  std::vector<ValueDifference> differences;  // the first kMostKept of them
  static constexpr size_t kMostKept = 1000;
};

// Dicts are compared by key, whatever their order. Under a tolerance numbers are compared as numbers, whatever their
// type. `wanted`: only leaves of these paths.
ValueComparison compare_values(const Value& a, const Value& b, const Tolerance& tolerance,
                               const std::function<bool(const std::string& path)>& wanted);

// What a checkpoint says beside its tensors, in a form that does not depend on the layout: the optimizer's options,
// which every file of a partial one has, once; with `manifest` its step and the model's configuration, too.
Value comparable_values(const Source& source, bool manifest);

}  // namespace shardsmith::cli
