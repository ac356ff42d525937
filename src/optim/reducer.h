// Averages gradients over the ranks that hold the same slice, in buckets: while one bucket is summed the next is
// packed.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "comm/group.h"

namespace shardsmith {

class GradientReducer {
 public:
  // Buckets go over the parameters from last to first, the order in which their gradients are ready.
  GradientReducer(std::vector<at::Tensor> parameters, double bucket_cap_mb);
  // grad = sum over `group` / group size, in place. A parameter without a gradient counts as zeros.
  void average(Group& group);

 private:
  std::vector<std::vector<at::Tensor>> buckets_;
};

}  // namespace shardsmith
