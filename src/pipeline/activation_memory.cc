#include "pipeline/activation_memory.h"

#include <algorithm>

#include "base/error.h"
#include "family/tensor_parallel.h"

namespace shardsmith {
namespace {

constexpr int64_t kFloat = 4;       // bytes
constexpr int64_t kLossRows = 512;  // of logits that exist at a time, as in nn/transformer.cc

}  // namespace

int64_t element_bytes(Precision precision) { return precision == Precision::kFp32 ? 4 : 2; }

Precision precision_of(const std::string& word) {
  if (word == "fp32") return Precision::kFp32;
  if (word == "bf16") return Precision::kBf16;
  if (word == "fp16") return Precision::kFp16;
  fail(ErrorKind::kInvalidArgument, "the precision must be fp32, bf16 or fp16, not '", word, "'");
}

ActivationMemory::ActivationMemory(const FamilyModel& model, const Workload& work) : m_(model.description) {
  check_tensor_parallel(m_, work.tp);
  wide_ = work.precision == Precision::kFp32;
  has_kernels_ = work.precision != Precision::kFp16;
  alone_ = work.tp == 1;
  split_ = work.split_sequence && !alone_;
  element_ = element_bytes(work.precision);
  tokens_ = work.rows * work.sequence;
  const int64_t positions = split_ ? (work.sequence + work.tp - 1) / work.tp : work.sequence;
  own_ = work.rows * positions * m_.hidden_size * element_;
  full_ = tokens_ * m_.hidden_size * element_;
  const int64_t heads = m_.num_attention_heads / work.tp, kv = std::max<int64_t>(1, m_.num_key_value_heads / work.tp);
  queries_ = tokens_ * heads * m_.attention_head_size * element_;
  keys_ = tokens_ * kv * m_.attention_head_size * element_;
  mlp_ = tokens_ * ((m_.intermediate_size + work.tp - 1) / work.tp) * element_;
  sums_ = tokens_ * heads;
  scores_ = sums_ * work.sequence;
  vocabulary_ = (m_.vocab_size + work.tp - 1) / work.tp;
  for (const FamilyTensor& tensor : model.tensors) by_head_ = by_head_ || tensor.pieces.front().run > 0;
}

// A norm keeps its input, and two numbers of each row. In float16 an RMSNorm is spelled out: it keeps its input as
// float32, and what it multiplies by the weight.
int64_t ActivationMemory::norm() const {
  const int64_t rows = own_ / element_ / m_.hidden_size;
  if (m_.norm == NormKind::kLayerNorm || has_kernels_) return own_ + rows * 2 * kFloat;
  return own_ / element_ * kFloat + own_;
}

// A dropout of hidden states is a product, which keeps the mask.
int64_t ActivationMemory::mask() const { return m_.hidden_dropout > 0 ? own_ : 0; }

// From the first product's input to the second's, both included.
int64_t ActivationMemory::attention() const {
  if (m_.attention_dropout > 0) {
    // Probabilities spelled out: softmax's result (float32 where there is no kernel), dropout's mask, and what the
    // weighted sum is given. Its products copy queries, keys and values until heads lie together, keys and values once
    // for each query head.
    return full_ + 3 * queries_ + scores_ * ((has_kernels_ ? element_ : kFloat) + 2 * element_) + queries_;
  }
  // torch's fused attention keeps what it is given, its result, which the second product takes as it is, and the
  // logarithm of each sum.
  int64_t kept = full_ + queries_ + 2 * keys_ + queries_ + sums_ * kFloat;
  // By head, values are a view that keeps all of the product, beside queries and keys that were rotated.
  if (by_head_ && m_.position == PositionKind::kRotary) kept += queries_ + keys_;
  return kept;
}

// The same of the feed-forward.
int64_t ActivationMemory::feed_forward() const {
  // GELU and SiLU keep their input; ReLU keeps its result, which the second product has as its input too.
  const bool is_relu = m_.activation == Activation::kRelu;
  if (!m_.gated) return full_ + (is_relu ? 1 : 2) * mlp_;
  // Of a gated pair `up` and the product, and what the activation keeps: its input, in our kernel and in ReLU instead
  // of its result, in others beside it.
  const bool one = is_relu || (m_.activation == Activation::kSilu && has_kernels_);
  return full_ + (one ? 3 : 4) * mlp_;
}

// With parallel residuals both norms have the same input.
int64_t ActivationMemory::layer() const {
  const bool is_shared = m_.parallel_residual && keeps_input();
  return norm() + attention() + mask() + (is_shared ? 0 : norm()) + feed_forward() + mask();
}

bool ActivationMemory::keeps_input() const {
  return m_.post_layernorm ? !split_ : m_.norm == NormKind::kLayerNorm || has_kernels_;
}

// Gradients that exist at a time. Those of the hidden states: of the residual stream, of the branch's result, and that
// behind its dropout. The feed-forward's: of the activation's result and of its input (two, where it is gated); what
// goes into the second product is let go of in between. When the attention goes backward the feed-forward's part is
// gone; spelled out, there are two gradients of its probabilities, as wide as softmax's result, and the product's are
// gone.
int64_t ActivationMemory::layer_backward() const {
  const int64_t output = 3 * full_ + (m_.gated ? 2 : 1) * mlp_;
  int64_t attention = 3 * full_ + 2 * queries_ + 2 * keys_ - (norm() + feed_forward() + mask());
  if (m_.attention_dropout > 0) attention += scores_ * (2 * (has_kernels_ ? element_ : kFloat) - element_);
  return std::max(output, attention);
}

// The dropout's mask, and where there is a norm, its input.
int64_t ActivationMemory::embedding() const {
  return (m_.embedding_layernorm ? norm() : 0) + (m_.embedding_dropout > 0 ? own_ : 0);
}

bool ActivationMemory::has_language_head() const {
  return m_.head == HeadKind::kCausalLm || m_.head == HeadKind::kMaskedLm;
}

// The loss makes the gradient of its input on the way. A head's transform keeps what activation and norm are given.
int64_t ActivationMemory::head() const {
  int64_t kept = m_.post_layernorm ? 0 : norm();
  if (m_.head_transform) kept += own_ + norm();
  return kept + (has_language_head() ? full_ : 0);
}

// Where there is a kernel the gradient takes the logits' place; a bias makes them float32. Otherwise log_softmax reads
// logits, as float32, and writes as many; where the vocabulary is split all is done in one place. What the loss is
// given is a copy: of the positions that have a next one, of what other ranks keep, or of the transform.
int64_t ActivationMemory::loss() const {
  if (!has_language_head()) return 0;
  const int64_t logits = std::min(kLossRows, tokens_) * vocabulary_;
  const int64_t narrow = wide_ ? 0 : element_;
  int64_t each = alone_ ? 2 * kFloat + (m_.head_bias ? 0 : narrow) : kFloat + narrow;
  if (has_kernels_) each = m_.head_bias ? kFloat + narrow : element_;
  return logits * each + (split_ ? 2 : 1) * full_;
}

int64_t ActivationMemory::rotary_tables() const {
  if (m_.position != PositionKind::kRotary) return 0;
  const int64_t dims = m_.rotary_dims > 0 ? m_.rotary_dims : m_.attention_head_size;
  return 2 * m_.num_positions * dims * kFloat;
}

}  // namespace shardsmith
