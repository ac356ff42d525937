// The language model's head and loss in one: no rank holds batch x sequence x vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include "nn/leaf_gradient.h"
#include "nn/tensor_parallel.h"

namespace shardsmith {

// Labels that count nowhere, as in transformers.
inline constexpr int64_t kIgnoredLabel = -100;

struct LossOptions {
  int64_t chunk = 512;  // rows of logits that exist at a time
  // With `spare`, which must outlive the graph, and a weight that nobody watches, the backward adds the weight's
  // gradient to weight.grad itself, from memory that the next microbatch uses again.
  SpareTensor* spare = nullptr;
  SpareTensor* logits = nullptr;  // where the logits are
  // Where the head's rows are split over ranks: `weight` [own, H] begins with row `first_row` of `vocab_size`. The
  // gradient of `hidden` is then this rank's summand.
  const TensorParallel* ranks = nullptr;
  int64_t first_row = 0, vocab_size = 0;
  // A loss scale that backward's gradient is going to hold: what is made on the way carries it already, so that small
  // gradients survive in float16, and backward takes it out of what it is given.
  double scale = 1;
  // The batch is put together from so many equal parts, each with a mean of its own.
  int64_t parts = 1;
};

// Mean over counted positions of -log softmax(hidden W^T)[label]. hidden [B, S, H] float; weight [V, H]; labels [B, S]
// int64; bias [V] or undefined. Returns a float32 scalar (float64 for float64 input), or one for each of several parts:
// [parts]; NaN where no label counts. Logits
// exist for a chunk at a time; where gradients are wanted they are computed on the way, so that backward only scales
// them. Under autocast the products run in its dtype. Throws Error(kInvalidArgument) for a label outside [0, V).
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
                                const at::Tensor& labels, const LossOptions& options = {});

// The same where position t predicts label t + 1 (transformers' ForCausalLMLoss).
at::Tensor causal_lm_loss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                          const LossOptions& options = {});

}  // namespace shardsmith
