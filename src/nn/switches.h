// What a user may switch of how the blocks compute: precisions, kernels, and ALiBi, which changes the function.
#pragma once

#include <optional>

namespace shardsmith {

struct BlockSwitches {
  bool attention_in_fp32 = false;        // AttentionSwitches::in_fp32
  bool query_key_layer_scaling = false;  // AttentionSwitches::query_key_layer
  bool fp32_residual_addition = false;   // the residual stream is float32, between stages too
  bool fused_dropout = false;            // bias, dropout and residual in one pass
  bool fused_softmax = true;             // AttentionSwitches::fused_softmax
  bool fused_bias_gelu = true;           // bias and GELU by tanh with the product
  bool flash_attention = true;           // AttentionSwitches::flash
  bool use_alibi = false;                // besides the family's own positions
  double alibi_bias_max = 8;
};

}  // namespace shardsmith
