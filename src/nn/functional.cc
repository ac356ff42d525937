#include "nn/functional.h"

#include <ATen/ATen.h>

#include <cmath>
#include <numbers>

#include "nn/kernels_cpu.h"
#include "nn/norm_cpu.h"

namespace shardsmith {

at::Tensor normalize(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, NormKind kind,
                     double epsilon) {
  const bool is_layer_norm = kind == NormKind::kLayerNorm;
  if (cpu::has_norm(x, weight, bias))
    return is_layer_norm ? cpu::layer_norm(x, weight, bias, epsilon) : cpu::rms_norm(x, weight, epsilon);
  if (is_layer_norm) return at::layer_norm(x, weight.sizes(), weight, bias, epsilon);
  const at::Tensor wide = x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
  const at::Tensor normed = wide * at::rsqrt(wide.pow(2).mean(-1, true) + epsilon);
  return weight * normed.to(x.scalar_type());
}

at::Tensor activate(const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return at::gelu(x);
    case Activation::kGeluTanh:
      return at::gelu(x, "tanh");
    case Activation::kRelu:
      return at::relu(x);
    case Activation::kSilu:
      return at::silu(x);
  }
  return x;
}

at::Tensor gated(const at::Tensor& gate, const at::Tensor& up, Activation activation) {
  if (activation == Activation::kSilu && cpu::has_kernel(gate, up) && gate.scalar_type() == up.scalar_type())
    return cpu::silu_mul(gate, up);
  return activate(gate, activation) * up;
}

RotaryTable make_rotary_table(const ModelDescription& m, int64_t positions, const at::TensorOptions& options) {
  const int64_t dims = m.rotary_dims > 0 ? m.rotary_dims : m.attention_head_size, half = dims / 2;
  const auto wide = at::TensorOptions().dtype(at::kFloat);
  at::Tensor frequency = at::empty({half}, wide);
  float* f = frequency.data_ptr<float>();
  for (int64_t i = 0; i < half; ++i) {
    const auto exponent = static_cast<float>(2 * i) / static_cast<float>(dims);
    f[i] = 1.0f / std::pow(static_cast<float>(m.rotary_theta), exponent);
    if (m.rotary_factor > 0) {  // "llama3": long wavelengths are stretched, short ones kept, those between mixed
      const double wavelength = 2 * std::numbers::pi / f[i];
      const double original = static_cast<double>(m.rotary_original_positions);
      const double low = original / m.rotary_low_freq_factor, high = original / m.rotary_high_freq_factor;
      if (wavelength > low) {
        f[i] = static_cast<float>(f[i] / m.rotary_factor);
      } else if (wavelength >= high) {
        const double smooth =
            (original / wavelength - m.rotary_low_freq_factor) / (m.rotary_high_freq_factor - m.rotary_low_freq_factor);
        f[i] = static_cast<float>((1 - smooth) * f[i] / m.rotary_factor + smooth * f[i]);
      }
    }
  }
  const at::Tensor angles = at::outer(at::arange(positions, wide), frequency);
  const at::Tensor both = at::cat({angles, angles}, -1);
  const at::ScalarType dtype = options.dtype() == at::kDouble ? at::kDouble : at::kFloat;
  return {both.cos().to(options.device(), dtype), both.sin().to(options.device(), dtype)};
}

at::Tensor rotate(const at::Tensor& x, const RotaryTable& table, const at::Tensor& positions) {
  const int64_t sequence = x.size(1), dims = table.cos.size(1), half = dims / 2;
  if (dims < x.size(3))
    return at::cat({rotate(x.slice(3, 0, dims).contiguous(), table, positions), x.slice(3, dims)}, 3);
  if (!positions.defined() && cpu::has_kernel(x, table.cos) && table.cos.scalar_type() == at::kFloat)
    return cpu::rotate(x, table.cos, table.sin);
  const auto rows = [&](const at::Tensor& t) {
    const at::Tensor picked = positions.defined()
                                  ? t.index_select(0, positions.reshape({-1})).view({-1, sequence, t.size(1)})
                                  : t.slice(0, 0, sequence).unsqueeze(0);
    return picked.unsqueeze(2).to(x.scalar_type());
  };
  const at::Tensor turned = at::cat({x.slice(3, half).neg(), x.slice(3, 0, half)}, 3);
  return x * rows(table.cos) + turned * rows(table.sin);
}

}  // namespace shardsmith
