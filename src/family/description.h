// ModelDescription: what a transformer is made of. One implementation (nn/) computes them all.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace shardsmith {

enum class NormKind : uint8_t { kLayerNorm, kRmsNorm };
enum class PositionKind : uint8_t { kLearned, kRotary };
enum class Activation : uint8_t { kGelu, kGeluTanh, kRelu, kSilu };
// What stands on the last block.
enum class HeadKind : uint8_t {
  kCausalLm,        // logits of the next token: lm_head over the final norm
  kMaskedLm,        // logits of the same token: head transform, then lm_head with a bias
  kClassification,  // logits [batch, num_labels] of a whole sequence: pooler, classifier dropout, classifier
  kNone,            // the hidden states [batch, sequence, hidden] and, with a pooler, its output [batch, hidden]
};
// Which loss a classification head has.
enum class ProblemKind : uint8_t {
  kByLabels,     // not said: regression where num_labels is 1, else single where labels are whole numbers, else multi
  kRegression,   // mean squared error
  kSingleLabel,  // cross-entropy
  kMultiLabel,   // binary cross-entropy with logits
};

struct ModelDescription {
  std::string model_type;  // config.json's: "gpt2", "llama", "mistral", "qwen2", "gpt_neox", "bert"
  int64_t num_layers = 0;
  int64_t hidden_size = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t attention_head_size = 0;
  int64_t intermediate_size = 0;
  int64_t vocab_size = 0;
  int64_t num_positions = 0;  // longest sequence that is computed as transformers does
  int64_t padding_idx = -1;   // the row of the word embedding that looking it up doesn't train; -1: none
  NormKind norm = NormKind::kLayerNorm;
  double layernorm_epsilon = 1e-5;
  PositionKind position = PositionKind::kLearned;
  double rotary_theta = 10000;
  // Llama-3 style scaling of the rotary frequencies; factor 0: none.
  double rotary_factor = 0, rotary_low_freq_factor = 1, rotary_high_freq_factor = 4;
  int64_t rotary_original_positions = 8192;
  // Leading dimensions of each query and key head that are rotated, an even number; the rest passes unchanged. 0: all.
  int64_t rotary_dims = 0;
  Activation activation = Activation::kGeluTanh;
  bool gated = false;  // gate, up, down instead of dense1, dense2
  // Where the norms stand. false: h += attention(norm(h)); h += mlp(norm(h)), and a final norm after the last block.
  // true (BERT): h = norm(h + attention(h)); h = norm(h + mlp(h)), no final norm.
  bool post_layernorm = false;
  // GPT-NeoX's use_parallel_residual: h += attention(norm1(h)) + mlp(norm2(h)), both from the same h.
  bool parallel_residual = false;
  int64_t num_token_types = 0;       // rows of token_type_embedding; 0: none. Ids left out are 0
  bool embedding_layernorm = false;  // on the sum of the embeddings, before their dropout
  bool attention_bias = true;        // query, key, value
  bool dense_bias = true;            // attention.dense
  bool mlp_bias = true;
  HeadKind head = HeadKind::kCausalLm;
  bool tied_head = true;  // the head's matrix is the word embedding's; false where there is no language model head
  bool head_transform = false;  // before lm_head: h = norm(activation(lm_head.transform(h)))
  bool head_bias = false;       // lm_head.bias, one for each word
  bool has_pooler = false;      // tanh(pooler(h of the first position)) [batch, hidden]
  int64_t num_labels = 0;       // rows of the classifier; 0: none
  ProblemKind problem = ProblemKind::kByLabels;
  bool causal = true;
  bool scale_by_inverse_layer = false;  // GPT-2's scale_attn_by_inverse_layer_idx
  double scale_attention = -1;          // softmax scale; < 0: 1 / sqrt(attention_head_size)
  double embedding_dropout = 0, attention_dropout = 0, hidden_dropout = 0;
  double classifier_dropout = 0;  // on the pooler's output, before the classifier
  double initializer_range = 0.02;
  // Of a torch_module: the dimension along which tensor-parallel ranks share a tensor, by name; all else is whole.
  std::map<std::string, int> split_axes;
  bool operator==(const ModelDescription&) const = default;
};

}  // namespace shardsmith
