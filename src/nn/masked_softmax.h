// The softmax of attention scores in one pass over memory, with the scale before it and the mask.
#pragma once

#include <ATen/core/Tensor.h>

namespace shardsmith {

// softmax(scores * scale + mask) over the last dimension, computed in float32 (float64 for float64), in the scores'
// dtype. scores [B, n, S, T] are used up: on the CPU the result takes their memory, and what the backward keeps is that
// alone. mask broadcasts to [B, n, S, T] and has no gradient; undefined: none. A row of which nothing is seen (all
// -infinity) gives zeros. Differentiable in scores.
at::Tensor masked_softmax(const at::Tensor& scores, const at::Tensor& mask, double scale);

// The same in torch's own operations; scores stay as they are.
at::Tensor masked_softmax_unfused(const at::Tensor& scores, const at::Tensor& mask, double scale);

}  // namespace shardsmith
