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
  // Where a batch is put together from several ranks' own: every `block_rows` rows the samples go on `block_stride`
  // after the block before. 0: all rows are of one block.
  uint64_t block_rows = 0, block_stride = 0;
  uint64_t sample(uint64_t row) const {
    return first_sample + (block_rows ? row / block_rows * block_stride + row % block_rows : row);
  }
};

// x [B, ...]; row b is global sample context.sample(b). Kept elements are scaled by 1 / (1 - p). `site` tells the
// places of a model apart. A rank that holds a part of each row says with which element of the row its part begins.
// Same numbers on every device.
at::Tensor dropout(const at::Tensor& x, double p, uint64_t site, const DropoutContext& context,
                   uint64_t first_element = 0);

// residual + dropout(x + bias) of one shape, bias [last dimension] or undefined. On the CPU, for float32 and bfloat16,
// one pass over memory whose backward makes the mask again instead of keeping it; the same numbers as the composition
// but for one rounding instead of three.
at::Tensor dropout_add(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual, double p, uint64_t site,
                       const DropoutContext& context);

}  // namespace shardsmith
