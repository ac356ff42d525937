#include "optim/adamw_update.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "layout/box.h"
#include "nn/elements.h"

namespace shardsmith {
namespace {

using elements::Bf16;
using elements::Fp16;
using elements::load;
using elements::store;

// Enough to hide what a piece costs by itself, small enough to share a parameter out.
constexpr int64_t kChunk = 16384;

// What the scalars come to in one step, in the arithmetic's own type.
struct Coefficients {
  float gradient, decay, beta1_rest, beta2, beta2_rest, root, epsilon, step_size;
};

Coefficients coefficients_of(const AdamWScalars& s, double step) {
  return {static_cast<float>(s.gradient_scale), static_cast<float>(1 - s.lr * s.weight_decay),
          static_cast<float>(1 - s.beta1),      static_cast<float>(s.beta2),
          static_cast<float>(1 - s.beta2),      static_cast<float>(std::sqrt(1 - std::pow(s.beta2, step))),
          static_cast<float>(s.epsilon),        static_cast<float>(-s.lr / (1 - std::pow(s.beta1, step)))};
}

// Stands for a parameter that has no rounded copy.
struct None {};
inline void store(None&, float) {}

template <typename G, typename R>
inline void update_loop(const G* __restrict gradient, float* __restrict master, float* __restrict average,
                        float* __restrict square, R* __restrict rounded, int64_t n, const Coefficients& c) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = load(gradient[i]) * c.gradient;
    // The end of the interpolation that is nearer is its base, as torch.lerp has it.
    const float m = c.beta1_rest < 0.5f ? std::fma(c.beta1_rest, g - average[i], average[i])
                                        : std::fma(c.beta1_rest - 1.0f, g - average[i], g);
    const float v = square[i] * c.beta2 + c.beta2_rest * g * g;
    const float p = master[i] * c.decay + c.step_size * m / (std::sqrt(v) / c.root + c.epsilon);
    average[i] = m;
    square[i] = v;
    master[i] = p;
    if constexpr (!std::is_same_v<R, None>) store(rounded[i], p);
  }
}

#define SHARDSMITH_UPDATE(Name, G, R)                                                                             \
  SHARDSMITH_VECTOR_CLONES void Name(const G* gradient, float* master, float* average, float* square, R* rounded, \
                                     int64_t n, const Coefficients& c) {                                          \
    update_loop(gradient, master, average, square, rounded, n, c);                                                \
  }
SHARDSMITH_UPDATE(update_float, float, None)
SHARDSMITH_UPDATE(update_float_bf16, float, Bf16)
SHARDSMITH_UPDATE(update_float_fp16, float, Fp16)
SHARDSMITH_UPDATE(update_bf16, Bf16, None)
SHARDSMITH_UPDATE(update_bf16_bf16, Bf16, Bf16)
SHARDSMITH_UPDATE(update_fp16, Fp16, None)
SHARDSMITH_UPDATE(update_fp16_fp16, Fp16, Fp16)
#undef SHARDSMITH_UPDATE

void update_range(const AdamWTensors& t, int64_t begin, int64_t end, const Coefficients& c) {
  float* master = t.master.data_ptr<float>() + begin;
  float* average = t.exp_avg.data_ptr<float>() + begin;
  float* square = t.exp_avg_sq.data_ptr<float>() + begin;
  const int64_t n = end - begin;
  const auto at = [&]<typename T>(const at::Tensor& tensor, T*) {
    return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) + begin : nullptr;
  };
  None* none = nullptr;
  Bf16* bf16 = nullptr;
  Fp16* fp16 = nullptr;
  float* wide = nullptr;
  const bool has_rounded = t.rounded.defined();
  const bool to_bf16 = has_rounded && t.rounded.scalar_type() == at::kBFloat16;
  switch (t.gradient.scalar_type()) {
    case at::kFloat:
      if (!has_rounded) return update_float(at(t.gradient, wide), master, average, square, none, n, c);
      if (to_bf16) return update_float_bf16(at(t.gradient, wide), master, average, square, at(t.rounded, bf16), n, c);
      return update_float_fp16(at(t.gradient, wide), master, average, square, at(t.rounded, fp16), n, c);
    case at::kBFloat16:
      if (!has_rounded) return update_bf16(at(t.gradient, bf16), master, average, square, none, n, c);
      return update_bf16_bf16(at(t.gradient, bf16), master, average, square, at(t.rounded, bf16), n, c);
    default:
      if (!has_rounded) return update_fp16(at(t.gradient, fp16), master, average, square, none, n, c);
      return update_fp16_fp16(at(t.gradient, fp16), master, average, square, at(t.rounded, fp16), n, c);
  }
}

bool is_narrow(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf;
}

// In the order of the master's memory; what lies otherwise in memory is copied (a gradient) or refused.
AdamWTensors checked(AdamWTensors t) {
  const at::Tensor& master = t.master;
  const auto refuse = [](const char* what, const at::Tensor& tensor) {
    fail(ErrorKind::kInvalidArgument, "AdamW: ", what, " of dtype ", toString(tensor.scalar_type()), " and shape ",
         to_string(Shape(tensor.sizes().begin(), tensor.sizes().end())), " does not fit its parameter");
  };
  const auto fits = [&](const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.sizes() == master.sizes() && tensor.strides() == master.strides();
  };
  if (!master.is_cpu() || master.scalar_type() != at::kFloat || !master.is_non_overlapping_and_dense())
    refuse("a master", master);
  for (const at::Tensor& moment : {t.exp_avg, t.exp_avg_sq})
    if (!fits(moment) || moment.scalar_type() != at::kFloat) refuse("a moment", moment);
  const at::Tensor& gradient = t.gradient;
  if (!gradient.is_cpu() || gradient.sizes() != master.sizes() ||
      (gradient.scalar_type() != at::kFloat && !is_narrow(gradient)))
    refuse("a gradient", gradient);
  if (t.rounded.defined() && (!fits(t.rounded) || !is_narrow(t.rounded) ||
                              (is_narrow(gradient) && gradient.scalar_type() != t.rounded.scalar_type())))
    refuse("a rounded parameter", t.rounded);
  if (gradient.strides() != master.strides())
    t.gradient = at::empty_strided(master.sizes(), master.strides(), gradient.options()).copy_(gradient);
  return t;
}

}  // namespace

void adamw_update(const std::vector<AdamWTensors>& parameters, const AdamWScalars& scalars) {
  at::NoGradGuard no_grad;
  std::vector<AdamWTensors> tensors;
  std::vector<Coefficients> coefficients;
  std::vector<int64_t> first;  // number of each parameter's first chunk
  int64_t chunks = 0;
  for (const AdamWTensors& parameter : parameters) {
    tensors.push_back(checked(parameter));
    coefficients.push_back(coefficients_of(scalars, parameter.step));
    first.push_back(chunks);
    chunks += (parameter.master.numel() + kChunk - 1) / kChunk;
  }
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    auto p = static_cast<size_t>(std::upper_bound(first.begin(), first.end(), begin) - first.begin() - 1);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      while (p + 1 < first.size() && first[p + 1] <= chunk) ++p;
      const int64_t from = (chunk - first[p]) * kChunk;
      update_range(tensors[p], from, std::min(from + kChunk, tensors[p].master.numel()), coefficients[p]);
    }
  });
}

}  // namespace shardsmith
