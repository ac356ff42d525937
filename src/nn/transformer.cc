#include "nn/transformer.h"

#include <ATen/ATen.h>

#include <cmath>

#include "base/error.h"
#include "nn/embedding.h"
#include "nn/loss.h"

namespace shardsmith {
namespace {

// Where a dropout stands in the model, for DropoutContext.
uint64_t site(int64_t layer, int which) { return 1 + 3 * static_cast<uint64_t>(layer) + static_cast<uint64_t>(which); }

// Every query sees itself, so that rows that are all padding stay finite; they count nowhere.
at::Tensor attention_mask(const at::Tensor& keep) {
  if (!keep.defined() || keep.ne(0).all().item<bool>()) return {};
  const int64_t sequence = keep.size(1);
  const at::Tensor causal = at::ones({sequence, sequence}, keep.options().dtype(at::kBool)).tril();
  const at::Tensor seen = at::logical_and(causal, keep.ne(0).view({-1, 1, 1, sequence}));
  return at::logical_or(seen, at::eye(sequence, keep.options().dtype(at::kBool)));
}

}  // namespace

Block::Block(const ModelDescription& m, const Parameters& p, int64_t layer) : description_(m), layer_(layer) {
  const std::string name = "transformer.seq_layers." + std::to_string(layer);
  const std::string attention = name + ".attention.", output = name + ".output.";
  attention_norm_weight_ = p.get(attention + "pre_layernorm.weight");
  output_norm_weight_ = p.get(output + "pre_layernorm.weight");
  if (m.norm == NormKind::kLayerNorm) {
    attention_norm_bias_ = p.get(attention + "pre_layernorm.bias");
    output_norm_bias_ = p.get(output + "pre_layernorm.bias");
  }
  qkv_ = p.linears({attention + "query", attention + "key", attention + "value"});
  dense_ = p.linear(attention + "dense");
  in_ = m.gated ? p.linears({output + "gate", output + "up"}) : p.linears({output + "dense1"});
  out_ = p.linear(output + (m.gated ? "down" : "dense2"));
  scale_ = m.scale_attention >= 0 ? m.scale_attention : 1.0 / std::sqrt(static_cast<double>(m.attention_head_size));
  if (m.scale_by_inverse_layer) scale_ /= static_cast<double>(layer + 1);
}

at::Tensor Block::attend(const at::Tensor& x, const at::Tensor& mask, const at::Tensor& positions,
                         const RotaryTable& rotary, const DropoutContext& dropout_context) const {
  const ModelDescription& m = description_;
  const int64_t batch = x.size(0), sequence = x.size(1), d = m.attention_head_size;
  const int64_t heads = m.num_attention_heads, kv_heads = m.num_key_value_heads;
  at::Tensor q, k, v;  // (B, S, n, d)
  if (qkv_.size() == 1) {
    const std::vector<at::Tensor> parts = qkv_[0](x).split_with_sizes({heads * d, kv_heads * d, kv_heads * d}, -1);
    q = parts[0], k = parts[1], v = parts[2];
  } else {
    q = qkv_[0](x), k = qkv_[1](x), v = qkv_[2](x);
  }
  q = q.view({batch, sequence, heads, d}), k = k.view({batch, sequence, kv_heads, d});
  v = v.view({batch, sequence, kv_heads, d});
  if (m.position == PositionKind::kRotary) q = rotate(q, rotary, positions), k = rotate(k, rotary, positions);
  q = q.transpose(1, 2), k = k.transpose(1, 2), v = v.transpose(1, 2);  // (B, n, S, d)
  at::Tensor y;
  if (dropout_context.active && m.attention_dropout > 0) {
    // torch's fused kernels draw their masks from a generator; ours come from a function, so the probabilities are
    // spelled out here.
    if (kv_heads != heads) k = k.repeat_interleave(heads / kv_heads, 1), v = v.repeat_interleave(heads / kv_heads, 1);
    at::Tensor scores = at::matmul(q, k.transpose(2, 3)) * scale_;
    const at::Tensor seen = mask.defined() ? mask : at::ones({sequence, sequence}, x.options().dtype(at::kBool)).tril();
    scores = scores.masked_fill(at::logical_not(seen), -std::numeric_limits<float>::infinity());
    at::Tensor p = at::softmax(scores, -1, scores.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    p = dropout(p, m.attention_dropout, site(layer_, 0), dropout_context).to(v.scalar_type());
    y = at::matmul(p, v);
  } else {
    y = at::scaled_dot_product_attention(q, k, v, mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt, 0.0,
                                         m.causal && !mask.defined(), scale_, heads != kv_heads);
  }
  return dense_(y.transpose(1, 2).reshape({batch, sequence, heads * d}));
}

at::Tensor Block::feed_forward(const at::Tensor& x) const {
  const Activation activation = description_.activation;
  if (!description_.gated) return out_(activate(in_[0](x), activation));
  if (in_.size() == 2) return out_(gated(in_[0](x), in_[1](x), activation));
  const std::vector<at::Tensor> halves = in_[0](x).chunk(2, -1);
  return out_(gated(halves[0], halves[1], activation));
}

at::Tensor Block::forward(const at::Tensor& x, const at::Tensor& mask, const at::Tensor& positions,
                          const RotaryTable& rotary, const DropoutContext& dropout_context) const {
  const ModelDescription& m = description_;
  const at::Tensor normed = normalize(x, attention_norm_weight_, attention_norm_bias_, m.norm, m.layernorm_epsilon);
  const at::Tensor attended = attend(normed, mask, positions, rotary, dropout_context);
  const at::Tensor h = x + dropout(attended, m.hidden_dropout, site(layer_, 1), dropout_context);
  const at::Tensor fed =
      feed_forward(normalize(h, output_norm_weight_, output_norm_bias_, m.norm, m.layernorm_epsilon));
  return h + dropout(fed, m.hidden_dropout, site(layer_, 2), dropout_context);
}

StageModel::StageModel(const FamilyModel& model, const Partition& partition, int stage, const Parameters& parameters)
    : description_(model.description) {
  const ModelDescription& m = description_;
  if (stage == 0) {
    word_embedding_ = parameters.get("word_embedding.weight");
    if (m.position == PositionKind::kLearned) position_embedding_ = parameters.get("position_embedding.weight");
  }
  const auto s = static_cast<size_t>(stage);
  for (int64_t layer = partition.first.at(s); layer < partition.first.at(s + 1); ++layer)
    blocks_.emplace_back(m, parameters, layer);
  if (stage == partition.stages() - 1) {
    norm_weight_ = parameters.get("layernorm.weight");
    if (m.norm == NormKind::kLayerNorm) norm_bias_ = parameters.get("layernorm.bias");
    head_ = parameters.get(m.tied_head ? "word_embedding.weight" : "lm_head.weight");
  }
  if (m.position == PositionKind::kRotary)
    rotary_ = make_rotary_table(m, m.num_positions, parameters.held().front().second.options());
}

at::Tensor StageModel::embed(const Inputs& inputs, const DropoutContext& dropout_context) const {
  at::Tensor x = embed_words(word_embedding_, inputs.input_ids, description_.padding_idx);
  if (position_embedding_.defined()) {
    x = x + (inputs.position_ids.defined() ? at::embedding(position_embedding_, inputs.position_ids)
                                           : position_embedding_.slice(0, 0, inputs.input_ids.size(1)));
  }
  return dropout(x, description_.embedding_dropout, 0, dropout_context);
}

at::Tensor StageModel::forward(const at::Tensor& x, const Inputs& inputs, const DropoutContext& dropout_context) const {
  const int64_t sequence = inputs.input_ids.size(1);
  if (sequence > description_.num_positions)
    fail(ErrorKind::kInvalidArgument, "input_ids have ", sequence, " positions, the model has ",
         description_.num_positions);
  at::Tensor h = has_embedding() ? embed(inputs, dropout_context) : x;
  const at::Tensor mask = attention_mask(inputs.attention_mask);
  for (const Block& block : blocks_) h = block.forward(h, mask, inputs.position_ids, rotary_, dropout_context);
  return has_head() ? normalize(h, norm_weight_, norm_bias_, description_.norm, description_.layernorm_epsilon) : h;
}

constexpr int64_t kLossRows = 512;  // logits that exist at a time

at::Tensor StageModel::loss(const at::Tensor& hidden, const at::Tensor& labels) const {
  return causal_lm_loss(hidden, head_, labels, kLossRows, head_gradient_.get());
}

at::Tensor StageModel::logits(const at::Tensor& hidden) const { return at::linear(hidden, head_); }

}  // namespace shardsmith
