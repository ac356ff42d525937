// The softmax of logits and its loss's gradient on the CPU, row by row: a row of logits stays in the cache from its
// maximum to its gradient, which takes its place.
#pragma once

#include <ATen/core/Tensor.h>

namespace shardsmith::cpu {

// True for contiguous logits [n, columns] of float32 or bfloat16 on the CPU.
bool has_softmax(const at::Tensor& logits);

// facts [3, n] float32, of each row: its maximum, the sum of exp(logit - maximum), and the logit at its label (0 where
// the label is not in [0, columns)). labels [n] int64. A row with a not-a-number or an infinity has not-a-number for
// its sum.
void softmax_facts(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& facts);

// logits := (exp(logit - maximum) / total - [at the label]) * scale; maximum, total, scale [n] float32.
void softmax_gradient(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& maximum,
                      const at::Tensor& total, const at::Tensor& scale);

}  // namespace shardsmith::cpu
