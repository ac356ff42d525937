#include "nn/attention.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "nn/masked_softmax.h"

namespace shardsmith {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

// What is added to the scores, broadcasting to [B, n, S, T]; undefined: nothing. float32, or float64 for float64.
at::Tensor added(const at::Tensor& mask, const AttentionOptions& options, int64_t queries, int64_t keys,
                 at::TensorOptions wide) {
  at::Tensor sum;
  const auto add = [&](const at::Tensor& part) { sum = sum.defined() ? sum + part : part; };
  if (mask.defined()) {
    if (mask.scalar_type() == at::kBool)
      add(at::zeros(mask.sizes(), wide).masked_fill(at::logical_not(mask), kNothing));
    else
      add(mask.to(wide));
  }
  if (options.slopes.defined()) {
    // The queries are the last ones of the keys' positions.
    at::Tensor distance =
        at::arange(keys, wide).unsqueeze(0) - at::arange(keys - queries, keys, wide).unsqueeze(1);  // [S, T]
    if (!options.causal) distance = distance.abs().neg();
    add((options.slopes.to(wide).view({-1, 1, 1}) * distance).unsqueeze(0));
  }
  if (options.causal) {
    const at::Tensor later = at::ones({queries, keys}, wide.dtype(at::kBool)).triu(keys - queries + 1);
    add(at::zeros({queries, keys}, wide).masked_fill(later, kNothing).view({1, 1, queries, keys}));
  }
  return sum;
}

}  // namespace

at::Tensor attention(const at::Tensor& q, const at::Tensor& k_in, const at::Tensor& v_in, const at::Tensor& mask,
                     const AttentionOptions& options, const DropoutContext& context) {
  const AttentionSwitches& s = options.switches;
  const int64_t heads = q.size(1), kv_heads = k_in.size(1), queries = q.size(2), keys = k_in.size(2);
  if (heads % kv_heads != 0)
    fail(ErrorKind::kInvalidArgument, "attention of ", heads, " heads over ", kv_heads, " key-value heads");
  const bool is_wide = q.scalar_type() == at::kFloat || q.scalar_type() == at::kDouble;
  const bool drops = context.active && options.dropout > 0;
  const auto wide_type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto wide = q.options().dtype(wide_type).requires_grad(false);
  if (s.flash && !drops && s.query_key_layer == 0 && (is_wide || !s.in_fp32)) {
    const bool alone = options.causal && !mask.defined() && !options.slopes.defined() && queries == keys;
    at::Tensor bias =
        alone ? at::Tensor()
        : mask.defined() && mask.scalar_type() == at::kBool && !options.causal && !options.slopes.defined()
            ? mask
            : added(mask, options, queries, keys, wide);
    if (bias.defined() && bias.scalar_type() != at::kBool) bias = bias.to(q.scalar_type());
    return at::scaled_dot_product_attention(q, k_in, v_in,
                                            bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt, 0.0, alone,
                                            options.scale, heads != kv_heads);
  }
  at::Tensor k = k_in, v = v_in;
  if (kv_heads != heads) {
    k = k.repeat_interleave(heads / kv_heads, 1);
    v = v.repeat_interleave(heads / kv_heads, 1);
  }
  const double divisor = s.query_key_layer > 0 ? static_cast<double>(s.query_key_layer) : 1.0;
  const at::ScalarType dtype = s.in_fp32 ? wide_type : q.scalar_type();
  const at::Tensor scores = at::matmul((q * (options.scale / divisor)).to(dtype), k.to(dtype).transpose(2, 3));
  const at::Tensor bias = added(mask, options, queries, keys, wide);
  at::Tensor p = s.fused_softmax ? masked_softmax(scores.contiguous(), bias, divisor)
                                 : masked_softmax_unfused(scores, bias, divisor);
  if (drops)
    p = dropout(p, options.dropout, options.site, context, static_cast<uint64_t>(options.first_head * queries * keys));
  return at::matmul(p, v.to(dtype)).to(v_in.scalar_type());
}

at::Tensor alibi_slopes(int64_t heads, double bias_max, int64_t first, int64_t count) {
  at::Tensor slopes = at::empty({count}, at::kFloat);
  int64_t power = 1;
  while (power * 2 <= heads) power *= 2;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t head = first + i;
    // Beyond the power of two: every second slope of twice as many.
    const double step = head < power ? static_cast<double>(head + 1) / static_cast<double>(power)
                                     : static_cast<double>(2 * (head - power) + 1) / static_cast<double>(2 * power);
    slopes.data_ptr<float>()[i] = static_cast<float>(std::pow(2.0, -bias_max * step));
  }
  return slopes;
}

}  // namespace shardsmith
