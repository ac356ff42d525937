// The language model's head and loss in one: no rank holds batch x sequence x vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include "nn/leaf_gradient.h"

namespace shardsmith {

// Labels that count nowhere, as in transformers.
inline constexpr int64_t kIgnoredLabel = -100;

// Mean over counted positions of -log softmax(hidden W^T)[label], position t predicting label t + 1 (transformers'
// ForCausalLMLoss). hidden [B, S, H] float; weight [V, H]; labels [B, S] int64. Returns a float32 scalar (float64 for
// float64 input), NaN where no label counts. Logits exist for `chunk` rows at a time; where gradients are wanted they
// are computed on the way, so that backward only scales them. Under autocast the products run in its dtype.
// Throws Error(kInvalidArgument) for a label outside [0, V).
//
// With `spare`, which must outlive the graph, and a weight that nobody watches, the backward adds the weight's gradient
// to weight.grad itself, from memory that the next microbatch uses again.
at::Tensor causal_lm_loss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                          int64_t chunk = 512, SpareTensor* spare = nullptr);

}  // namespace shardsmith
