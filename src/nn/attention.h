// Scores, softmax and weighted sum of one attention, in the ways that a model's switches ask for.
#pragma once

#include <ATen/core/Tensor.h>

#include "nn/dropout.h"

namespace shardsmith {

// Which kernels compute, and in what precision. The function computed is the same with all of them.
struct AttentionSwitches {
  bool flash = true;          // torch's fused attention where nothing else is asked for: no scores in memory
  bool fused_softmax = true;  // otherwise: scale, mask and softmax in one pass (masked_softmax.h), not one each
  bool in_fp32 = false;       // scores and weighted sum in float32
  // The layer's number from 1: scores are divided by it and multiplied again in the softmax's float32, so that they
  // don't overflow float16 (Shoeybi et al., "Megatron-LM"). 0: off.
  int64_t query_key_layer = 0;
};

struct AttentionOptions {
  bool causal = false;  // query i sees keys 0..i + T - S
  double scale = 1;     // of the scores
  at::Tensor slopes;    // [n] float, ALiBi's: scores + slope * (key - query) where causal, else - slope * |key - query|
  double dropout = 0;   // of the probabilities
  uint64_t site = 0;
  int64_t first_head = 0;  // number of head 0 in the whole model, for dropout's masks
  AttentionSwitches switches;
};

// q [B, n, S, d]; k, v [B, kv, T, d], n a multiple of kv. mask, undefined or broadcasting to [B, n, S, T]: bool, true =
// seen, or added to the scores. -> [B, n, S, d] in v's dtype. A query that sees nothing gives zeros.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask,
                     const AttentionOptions& options, const DropoutContext& dropout);

// ALiBi's slopes (Press, Smith, Lewis, "Train short, test long"; for counts that are no power of two as in their code)
// of heads [first, first + count) of `heads`, times `bias_max` / 8 in the exponent. [count] float32.
at::Tensor alibi_slopes(int64_t heads, double bias_max, int64_t first, int64_t count);

}  // namespace shardsmith
