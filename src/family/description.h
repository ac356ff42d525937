// ModelDescription: what a transformer is made of. One implementation (nn/) computes them all.
#pragma once

#include <cstdint>
#include <string>

namespace shardsmith {

enum class NormKind : uint8_t { kLayerNorm, kRmsNorm };
enum class PositionKind : uint8_t { kLearned, kRotary };
enum class Activation : uint8_t { kGelu, kGeluTanh, kRelu, kSilu };

struct ModelDescription {
  std::string model_type;  // "gpt2", "llama"
  int64_t num_layers = 0;
  int64_t hidden_size = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t attention_head_size = 0;
  int64_t intermediate_size = 0;
  int64_t vocab_size = 0;
  int64_t num_positions = 0;  // longest sequence
  int64_t padding_idx = -1;   // the row of the word embedding that looking it up doesn't train; -1: none
  NormKind norm = NormKind::kLayerNorm;
  double layernorm_epsilon = 1e-5;
  PositionKind position = PositionKind::kLearned;
  double rotary_theta = 10000;
  // Llama-3 style scaling of the rotary frequencies; factor 0: none.
  double rotary_factor = 0, rotary_low_freq_factor = 1, rotary_high_freq_factor = 4;
  int64_t rotary_original_positions = 8192;
  Activation activation = Activation::kGeluTanh;
  bool gated = false;          // gate, up, down instead of dense1, dense2
  bool attention_bias = true;  // query, key, value
  bool dense_bias = true;      // attention.dense
  bool mlp_bias = true;
  bool tied_head = true;
  bool causal = true;
  bool scale_by_inverse_layer = false;  // GPT-2's scale_attn_by_inverse_layer_idx
  double scale_attention = -1;          // softmax scale; < 0: 1 / sqrt(attention_head_size)
  double embedding_dropout = 0, attention_dropout = 0, hidden_dropout = 0;
  double initializer_range = 0.02;
  bool operator==(const ModelDescription&) const = default;
};

}  // namespace shardsmith
