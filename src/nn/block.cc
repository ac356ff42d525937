#include "nn/block.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "nn/attention.h"
#include "nn/linear_cpu.h"

namespace shardsmith {
namespace {

// Where a dropout stands in the model, for DropoutContext.
uint64_t site(int64_t layer, int which) { return 1 + 3 * static_cast<uint64_t>(layer) + static_cast<uint64_t>(which); }

bool has_gradient(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }
bool has_gradient(const Norm& norm) { return has_gradient(norm.weight) || has_gradient(norm.bias); }
bool has_gradient(const std::vector<Linear>& linears) {
  return std::any_of(linears.begin(), linears.end(),
                     [](const Linear& linear) { return has_gradient(linear.weight) || has_gradient(linear.bias); });
}

}  // namespace

at::Tensor normalize(const at::Tensor& x, const Norm& norm, const ModelDescription& description,
                     const TensorParallel& ranks) {
  const at::Tensor weight = ranks.replicated(norm.weight), bias = ranks.replicated(norm.bias);
  const at::ScalarType narrow = weight.scalar_type(), wide = x.scalar_type();
  if (narrow == wide || wide != at::kFloat)
    return normalize(x, weight, bias, description.norm, description.layernorm_epsilon);
  // A float32 residual stream with narrow parameters.
  return normalize(x, weight.to(wide), bias.defined() ? bias.to(wide) : bias, description.norm,
                   description.layernorm_epsilon)
      .to(narrow);
}

Block::Block(const ModelDescription& m, const Parameters& p, int64_t layer, const TensorParallel& ranks,
             const BlockSwitches& switches)
    : description_(m), layer_(layer), ranks_(ranks), switches_(switches) {
  const std::string name = "transformer.seq_layers." + std::to_string(layer);
  const std::string attention = name + ".attention.", output = name + ".output.";
  const std::string which = m.post_layernorm ? "layernorm" : "pre_layernorm";
  attention_norm_ = p.norm(attention + which);
  output_norm_ = p.norm(output + which);
  qkv_ = p.linears({attention + "query", attention + "key", attention + "value"});
  dense_ = p.linear(attention + "dense");
  in_ = m.gated ? p.linears({output + "gate", output + "up"}) : p.linears({output + "dense1"});
  out_ = p.linear(output + (m.gated ? "down" : "dense2"));
  heads_ = m.num_attention_heads / ranks.size();
  kv_heads_ = std::max<int64_t>(1, m.num_key_value_heads / ranks.size());
  kv_copies_ = static_cast<int>(std::max<int64_t>(1, ranks.size() / m.num_key_value_heads));
  scale_ = m.scale_attention >= 0 ? m.scale_attention : 1.0 / std::sqrt(static_cast<double>(m.attention_head_size));
  if (m.scale_by_inverse_layer) scale_ /= static_cast<double>(layer + 1);
  if (switches.use_alibi)
    slopes_ = alibi_slopes(m.num_attention_heads, switches.alibi_bias_max, ranks.rank() * heads_, heads_)
                  .to(dense_.weight.device());
}

at::Tensor Block::before(const at::Tensor& x, const Norm& norm) const {
  return description_.post_layernorm ? x : normed(x, norm);
}

at::Tensor Block::normed(const at::Tensor& x, const Norm& norm) const {
  return normalize(x, norm, description_, ranks_);
}

at::Tensor Block::by_rows(const Linear& linear, const at::Tensor& x, const at::Tensor& residual) const {
  if (residual.defined()) return cpu::linear_residual(x, linear.weight, linear.bias, linear.in_out, residual);
  if (ranks_.size() == 1) return linear(x);
  const at::Tensor y = ranks_.leave(linear.product(x));
  return linear.bias.defined() ? y + ranks_.replicated(linear.bias) : y;
}

at::Tensor Block::hidden_dropout(const at::Tensor& x, int which, const BlockContext& context) const {
  const int64_t first = ranks_.positions(context.sequence).begin * description_.hidden_size;
  return dropout(x, description_.hidden_dropout, site(layer_, which), context.dropout, static_cast<uint64_t>(first));
}

at::Tensor Block::attended(const at::Tensor& x, const BlockContext& context) const {
  const int64_t d = description_.attention_head_size;
  const at::Tensor in = ranks_.enter(x, context.sequence);
  const int64_t batch = in.size(0), sequence = in.size(1);
  at::Tensor q, k, v;  // (B, S, n, d)
  if (qkv_.size() == 1 && qkv_[0].by_head) {
    const at::Tensor fused = qkv_[0](in).view({batch, sequence, heads_, 3, d});
    q = fused.select(3, 0), k = fused.select(3, 1), v = fused.select(3, 2);
  } else if (qkv_.size() == 1) {
    const std::vector<at::Tensor> parts = qkv_[0](in).split_with_sizes({heads_ * d, kv_heads_ * d, kv_heads_ * d}, -1);
    q = parts[0], k = parts[1], v = parts[2];
  } else {
    const auto shared = [&](const Linear& linear) {
      return Linear{ranks_.shared(linear.weight, kv_copies_), ranks_.shared(linear.bias, kv_copies_), linear.in_out};
    };
    q = qkv_[0](in), k = shared(qkv_[1])(in), v = shared(qkv_[2])(in);
  }
  q = q.reshape({batch, sequence, heads_, d}), k = k.reshape({batch, sequence, kv_heads_, d});
  v = v.reshape({batch, sequence, kv_heads_, d});
  if (description_.position == PositionKind::kRotary) {
    q = rotate(q, *context.rotary, context.positions);
    k = rotate(k, *context.rotary, context.positions);
  }
  const at::Tensor y = scores_and_sum(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), context);
  return y.transpose(1, 2).reshape({batch, sequence, heads_ * d});
}

// q [B, n, S, d], k and v [B, kv, S, d] -> [B, n, S, d].
at::Tensor Block::scores_and_sum(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const BlockContext& context) const {
  AttentionOptions options;
  options.causal = description_.causal && !context.mask.defined();  // a mask says it too
  options.scale = scale_;
  options.slopes = slopes_;
  options.dropout = description_.attention_dropout;
  options.site = site(layer_, 0);
  options.first_head = ranks_.rank() * heads_;
  options.switches = {switches_.flash_attention, switches_.fused_softmax, switches_.attention_in_fp32,
                      switches_.query_key_layer_scaling ? layer_ + 1 : 0};
  return attention(q, k, v, context.mask, options, context.dropout);
}

at::Tensor Block::activated(const at::Tensor& x, const BlockContext& context) const {
  const Activation activation = description_.activation;
  const at::Tensor in = ranks_.enter(x, context.sequence);
  if (!description_.gated) {
    const Linear& first = in_[0];
    const bool one = switches_.fused_bias_gelu && activation == Activation::kGeluTanh &&
                     cpu::has_linear(in, first.weight, first.bias);
    return one ? cpu::linear_gelu(in, first.weight, first.bias, first.in_out) : activate(first(in), activation);
  }
  if (in_.size() == 2) return gated(in_[0](in), in_[1](in), activation);
  const std::vector<at::Tensor> halves = in_[0](in).chunk(2, -1);
  return gated(halves[0], halves[1], activation);
}

at::Tensor Block::attention_branch(const at::Tensor& x, const BlockContext& context, const at::Tensor& residual) const {
  return hidden_dropout(by_rows(dense_, attended(before(x, attention_norm_), context), residual), 1, context);
}

at::Tensor Block::output_branch(const at::Tensor& x, const BlockContext& context, const at::Tensor& residual) const {
  return hidden_dropout(by_rows(out_, activated(before(x, output_norm_), context), residual), 2, context);
}

// The residual may be added where the product's bias is: nothing comes between them.
bool Block::adds_residual(const Linear& last, const at::Tensor& x, const BlockContext& context) const {
  const bool has_dropout = context.dropout.active && description_.hidden_dropout > 0;
  return ranks_.size() == 1 && !has_dropout && !switches_.fp32_residual_addition &&
         cpu::has_linear(x, last.weight, last.bias);
}

at::Tensor Block::attention_alone(const at::Tensor& x, const BlockContext& context) const {
  return attention_branch(x, context, {});
}

at::Tensor Block::output_alone(const at::Tensor& x, const BlockContext& context) const {
  return output_branch(x, context, {});
}

// Each rank keeps the positions from the first on, which is what the kernel counts from.
bool Block::fuses_dropout(const at::Tensor& x, const BlockContext& context) const {
  return switches_.fused_dropout && !switches_.fp32_residual_addition && context.dropout.active &&
         description_.hidden_dropout > 0 && !ranks_.splits_sequence() && x.numel() > 0;
}

at::Tensor Block::fused_sum(const at::Tensor& x, const Linear& last, const at::Tensor& in, int which,
                            const BlockContext& context) const {
  const at::Tensor y = ranks_.leave(last.product(in));
  const at::Tensor bias = last.bias.defined() ? ranks_.replicated(last.bias) : last.bias;
  return dropout_add(y, bias, x, description_.hidden_dropout, site(layer_, which), context.dropout);
}

at::Tensor Block::sum(const at::Tensor& x, const at::Tensor& branch) const {
  if (!switches_.fp32_residual_addition || x.scalar_type() == at::kDouble) return x + branch;
  return x.to(at::kFloat) + branch.to(at::kFloat);
}

at::Tensor Block::attention_sum(const at::Tensor& x, const BlockContext& context) const {
  if (adds_residual(dense_, x, context)) return attention_branch(x, context, x);
  if (fuses_dropout(x, context)) return fused_sum(x, dense_, attended(before(x, attention_norm_), context), 1, context);
  return sum(x, attention_alone(x, context));
}

at::Tensor Block::output_sum(const at::Tensor& x, const BlockContext& context) const {
  if (adds_residual(out_, x, context)) return output_branch(x, context, x);
  if (fuses_dropout(x, context)) return fused_sum(x, out_, activated(before(x, output_norm_), context), 2, context);
  return sum(x, output_alone(x, context));
}

bool Block::attention_is_trainable() const {
  return has_gradient(qkv_) || has_gradient({dense_}) || has_gradient(attention_norm_);
}

bool Block::output_is_trainable() const {
  return has_gradient(in_) || has_gradient({out_}) || has_gradient(output_norm_);
}

at::Tensor Block::forward(const at::Tensor& x, const BlockContext& context,
                          const ActivationCheckpoint& checkpoint) const {
  const auto part = [&](const at::Tensor& in, bool is_checkpointed, const auto& is_trainable, const auto& method) {
    const auto run = [this, context, method](const at::Tensor& h) { return (this->*method)(h, context); };
    return is_checkpointed ? checkpointed(in, run, (this->*is_trainable)()) : run(in);
  };
  const auto attention_trains = &Block::attention_is_trainable, output_trains = &Block::output_is_trainable;
  if (description_.parallel_residual) {
    return sum(sum(x, part(x, checkpoint.attention, attention_trains, &Block::attention_alone)),
               part(x, checkpoint.output, output_trains, &Block::output_alone));
  }
  at::Tensor h = part(x, checkpoint.attention, attention_trains, &Block::attention_sum);
  if (description_.post_layernorm) h = normed(h, attention_norm_);
  h = part(h, checkpoint.output, output_trains, &Block::output_sum);
  return description_.post_layernorm ? normed(h, output_norm_) : h;
}

}  // namespace shardsmith
