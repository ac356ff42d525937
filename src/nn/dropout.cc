#include "nn/dropout.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "nn/cpu_tensor.h"

namespace shardsmith {
namespace {

// splitmix64's finalizer (Steele, Lea, Flood, "Fast splittable pseudorandom number generators").
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;

uint64_t key_of(uint64_t site, const DropoutContext& c) {
  return mix(mix(mix(c.seed + kGolden) ^ (c.step + kGolden)) ^ (site + kGolden));
}

// An element is kept where the top 24 bits of mix(row_key + element * golden) are below this.
uint32_t threshold(double p) { return static_cast<uint32_t>(std::lround((1.0 - p) * (1 << 24))); }

// The mask of a [B, ...], of which each element is a function.
struct Mask {
  uint64_t key;
  uint32_t keep;
  float scale;
  DropoutContext context;
  uint64_t first_element;  // of each row, that is here
};

// Calls body(i, column, factor) for all elements of [B, ...], in parallel; factor is 0 or the scale.
template <typename F>
void for_each(const at::Tensor& x, const Mask& mask, const F& body) {
  const int64_t row = x.numel() / x.size(0), columns = x.size(-1);
  at::parallel_for(0, x.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t row_key = mix(mask.key ^ mask.context.sample(static_cast<uint64_t>(i / row)));
      const uint64_t h = mix(row_key + (mask.first_element + static_cast<uint64_t>(i % row)) * kGolden);
      body(i, i % columns, (h >> 40) < mask.keep ? mask.scale : 0.0f);
    }
  });
}

at::Tensor cpu_mask(const at::Tensor& x, const Mask& mask) {
  at::Tensor factors = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  float* out = factors.data_ptr<float>();
  for_each(x, mask, [&](int64_t i, int64_t, float factor) { out[i] = factor; });
  return factors;
}

// The same with int64 arithmetic that wraps, for any device.
at::Tensor shift(const at::Tensor& z, int64_t bits) {
  return at::bitwise_and(at::bitwise_right_shift(z, at::Scalar(bits)), at::Scalar((int64_t{1} << (64 - bits)) - 1));
}
at::Tensor mix(at::Tensor z) {
  z = at::bitwise_xor(z, shift(z, 30)).mul(static_cast<int64_t>(0xbf58476d1ce4e5b9ULL));
  z = at::bitwise_xor(z, shift(z, 27)).mul(static_cast<int64_t>(0x94d049bb133111ebULL));
  return at::bitwise_xor(z, shift(z, 31));
}
at::Tensor device_mask(const at::Tensor& x, const Mask& mask) {
  const int64_t rows = x.size(0);
  const int64_t row = rows ? x.numel() / rows : 0;
  const auto options = x.options().dtype(at::kLong);
  std::vector<int64_t> numbers;
  for (int64_t b = 0; b < rows; ++b)
    numbers.push_back(static_cast<int64_t>(mask.context.sample(static_cast<uint64_t>(b))));
  const at::Tensor samples = at::tensor(numbers, at::kLong).to(x.device());
  const at::Tensor row_key = mix(at::bitwise_xor(samples, at::Scalar(static_cast<int64_t>(mask.key)))).unsqueeze(1);
  const auto first = static_cast<int64_t>(mask.first_element);
  const at::Tensor element = at::arange(first, first + row, options).mul(static_cast<int64_t>(kGolden)).unsqueeze(0);
  const at::Tensor kept = shift(mix(row_key + element), 40).lt(static_cast<int64_t>(mask.keep));
  return kept.to(at::kFloat).mul(mask.scale).view(x.sizes());
}

Mask mask_of(double p, uint64_t site, const DropoutContext& context, uint64_t first_element) {
  return {key_of(site, context), threshold(p), static_cast<float>(1.0 / (1.0 - p)), context, first_element};
}

struct DropoutAdd : torch::autograd::Function<DropoutAdd> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x_in,
                            const std::optional<at::Tensor>& bias, const at::Tensor& residual_in, const Mask& mask) {
    const at::Tensor x = x_in.contiguous(), residual = residual_in.contiguous();
    at::Tensor y = at::empty_like(x);
    cpu::by_dtype(x, [&](auto t) {
      using T = decltype(t);
      const T *a = cpu::in<T>(x), *r = cpu::in<T>(residual), *b = bias ? cpu::in<T>(*bias) : nullptr;
      T* to = cpu::out<T>(y);
      for_each(x, mask, [&](int64_t i, int64_t column, float factor) {
        const float added = b ? elements::load(b[column]) : 0.0f;
        elements::store(to[i], elements::load(r[i]) + factor * (elements::load(a[i]) + added));
      });
    });
    const std::string_view bytes(reinterpret_cast<const char*>(&mask), sizeof mask);
    context->saved_data["mask"] = std::string(bytes);
    context->saved_data["has_bias"] = bias.has_value();
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    Mask mask;
    const std::string bytes = context->saved_data["mask"].toStringRef();
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(&mask));
    const at::Tensor g = grads[0].contiguous();
    at::Tensor out = at::empty_like(g);
    cpu::by_dtype(g, [&](auto t) {
      using T = decltype(t);
      const T* from = cpu::in<T>(g);
      T* to = cpu::out<T>(out);
      for_each(g, mask,
               [&](int64_t i, int64_t, float factor) { elements::store(to[i], factor * elements::load(from[i])); });
    });
    const bool has_bias = context->saved_data["has_bias"].toBool();
    return {out, has_bias ? out.reshape({-1, out.size(-1)}).sum(0) : at::Tensor(), grads[0], at::Tensor()};
  }
};

}  // namespace

at::Tensor dropout_add(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual, double p, uint64_t site,
                       const DropoutContext& context) {
  const bool has_kernel = cpu::is_kernel_dtype(x) && x.scalar_type() == residual.scalar_type() && x.numel() > 0 &&
                          x.sizes() == residual.sizes() &&
                          (!bias.defined() || (bias.scalar_type() == x.scalar_type() && bias.is_contiguous()));
  if (!has_kernel || !context.active || p <= 0)
    return residual + dropout(bias.defined() ? x + bias : x, p, site, context);
  return DropoutAdd::apply(x, bias.defined() ? std::optional(bias) : std::nullopt, residual,
                           mask_of(p, site, context, 0));
}

at::Tensor dropout(const at::Tensor& x, double p, uint64_t site, const DropoutContext& context,
                   uint64_t first_element) {
  if (!context.active || p <= 0 || x.numel() == 0) return x;
  const Mask mask = mask_of(p, site, context, first_element);
  return x * (x.device().is_cpu() ? cpu_mask(x, mask) : device_mask(x, mask)).to(x.scalar_type());
}

}  // namespace shardsmith
