// Dropout whose mask is a function of (seed, step, site, global sample, element), not of a generator's state, so that
// every layout and every recomputation gives the same numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shardsmith {

struct DropoutContext {
  bool active = false;  // false: every dropout is the identity
  uint64_t seed = 0;
  uint64_t step = 0;
  uint64_t first_sample = 0;  // global number of row 0 of the batch
};

// x [B, ...]; row b is global sample first_sample + b. Kept elements are scaled by 1 / (1 - p). `site` tells the
// places of a model apart. Same numbers on every device.
at::Tensor dropout(const at::Tensor& x, double p, uint64_t site, const DropoutContext& context);

}  // namespace shardsmith
