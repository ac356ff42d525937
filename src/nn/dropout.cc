#include "nn/dropout.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>

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

at::Tensor cpu_mask(const at::Tensor& x, uint64_t key, uint32_t keep, float scale, const DropoutContext& context,
                    uint64_t first_element) {
  at::Tensor mask = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  const int64_t rows = x.size(0);
  const int64_t row = rows ? x.numel() / rows : 0;
  float* out = mask.data_ptr<float>();
  at::parallel_for(0, x.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t row_key = mix(key ^ context.sample(static_cast<uint64_t>(i / row)));
      const uint64_t h = mix(row_key + (first_element + static_cast<uint64_t>(i % row)) * kGolden);
      out[i] = (h >> 40) < keep ? scale : 0.0f;
    }
  });
  return mask;
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
at::Tensor device_mask(const at::Tensor& x, uint64_t key, uint32_t keep, float scale, const DropoutContext& context,
                       uint64_t first_element) {
  const int64_t rows = x.size(0);
  const int64_t row = rows ? x.numel() / rows : 0;
  const auto options = x.options().dtype(at::kLong);
  std::vector<int64_t> numbers;
  for (int64_t b = 0; b < rows; ++b) numbers.push_back(static_cast<int64_t>(context.sample(static_cast<uint64_t>(b))));
  const at::Tensor samples = at::tensor(numbers, at::kLong).to(x.device());
  const at::Tensor row_key = mix(at::bitwise_xor(samples, at::Scalar(static_cast<int64_t>(key)))).unsqueeze(1);
  const auto first = static_cast<int64_t>(first_element);
  const at::Tensor element = at::arange(first, first + row, options).mul(static_cast<int64_t>(kGolden)).unsqueeze(0);
  const at::Tensor kept = shift(mix(row_key + element), 40).lt(static_cast<int64_t>(keep));
  return kept.to(at::kFloat).mul(scale).view(x.sizes());
}

}  // namespace

at::Tensor dropout(const at::Tensor& x, double p, uint64_t site, const DropoutContext& context,
                   uint64_t first_element) {
  if (!context.active || p <= 0 || x.numel() == 0) return x;
  const uint64_t key = key_of(site, context);
  const float scale = static_cast<float>(1.0 / (1.0 - p));
  const auto make_mask = x.device().is_cpu() ? cpu_mask : device_mask;
  return x * make_mask(x, key, threshold(p), scale, context, first_element).to(x.scalar_type());
}

}  // namespace shardsmith
