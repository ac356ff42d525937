#include "nn/norm_cpu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "nn/cpu_tensor.h"

namespace shardsmith::cpu {
namespace {

using elements::Bf16;
using elements::load;
using elements::store;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What a row is normalised by: (x - mean) * scale. An RMSNorm's mean is 0.
struct Moments {
  float mean, scale;
};

template <bool kCentered, typename T>
inline Moments moments(const T* x, int64_t n, float epsilon) {
  float sum = 0, squares = 0;
  if constexpr (kCentered) {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += load(x[i]);
  }
  const float mean = sum / static_cast<float>(n);
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; ++i) {
    const float d = load(x[i]) - mean;
    squares += d * d;
  }
  return {mean, 1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon)};
}

// y = w (x - mean) scale + b.
template <bool kCentered, typename T>
inline Moments norm_row(const T* x, const T* w, const T* b, T* y, int64_t n, float epsilon) {
  const Moments m = moments<kCentered>(x, n, epsilon);
  if (b) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(y[i], load(w[i]) * ((load(x[i]) - m.mean) * m.scale) + load(b[i]));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(y[i], load(w[i]) * ((load(x[i]) - m.mean) * m.scale));
  }
  return m;
}

// With z = (x - mean) scale: dx = scale (g w - mean(g w) - z mean(g w z)), the middle term where the mean is taken
// away; dw += g z, db += g.
template <bool kCentered, typename T>
inline void norm_row_backward(const T* g, const T* x, const T* w, Moments m, T* dx, float* dw, float* db, int64_t n) {
  float sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
  for (int64_t i = 0; i < n; ++i) {
    const float gw = load(g[i]) * load(w[i]);
    sum += gw;
    dot += gw * ((load(x[i]) - m.mean) * m.scale);
  }
  const float mean = kCentered ? sum / static_cast<float>(n) : 0.0f, slope = dot / static_cast<float>(n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float z = (load(x[i]) - m.mean) * m.scale, gradient = load(g[i]);
    store(dx[i], m.scale * (gradient * load(w[i]) - mean - z * slope));
    dw[i] += gradient * z;
    if constexpr (kCentered) db[i] += gradient;
  }
}

#define SHARDSMITH_NORM(T)                                                                                          \
  SHARDSMITH_VECTOR_CLONES Moments layer_row(const T* x, const T* w, const T* b, T* y, int64_t n, float epsilon) {  \
    return norm_row<true>(x, w, b, y, n, epsilon);                                                                  \
  }                                                                                                                 \
  SHARDSMITH_VECTOR_CLONES Moments rms_row(const T* x, const T* w, T* y, int64_t n, float epsilon) {                \
    return norm_row<false>(x, w, static_cast<const T*>(nullptr), y, n, epsilon);                                    \
  }                                                                                                                 \
  SHARDSMITH_VECTOR_CLONES void layer_row_backward(const T* g, const T* x, const T* w, Moments m, T* dx, float* dw, \
                                                   float* db, int64_t n) {                                          \
    norm_row_backward<true>(g, x, w, m, dx, dw, db, n);                                                             \
  }                                                                                                                 \
  SHARDSMITH_VECTOR_CLONES void rms_row_backward(const T* g, const T* x, const T* w, Moments m, T* dx, float* dw,   \
                                                 int64_t n) {                                                       \
    norm_row_backward<false>(g, x, w, m, dx, dw, nullptr, n);                                                       \
  }
SHARDSMITH_NORM(float)
SHARDSMITH_NORM(Bf16)
#undef SHARDSMITH_NORM

struct NormFunction : torch::autograd::Function<NormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_in, const at::Tensor& weight,
                            const std::optional<at::Tensor>& given_bias, double epsilon, bool is_centered) {
    const at::Tensor x = x_in.contiguous(), bias = given_bias.value_or(at::Tensor());
    const int64_t n = weight.numel(), rows = x.numel() / n;
    at::Tensor y = at::empty_like(x), moments = at::empty({rows, 2}, x.options().dtype(at::kFloat));
    auto* kept = reinterpret_cast<Moments*>(out<float>(moments));
    const auto e = static_cast<float>(epsilon);
    by_dtype(x, [&](auto t) {
      using T = decltype(t);
      const T *px = in<T>(x), *w = in<T>(weight), *b = bias.defined() ? in<T>(bias) : nullptr;
      T* py = out<T>(y);
      at::parallel_for(0, rows, kGrain / n + 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          kept[i] =
              is_centered ? layer_row(px + i * n, w, b, py + i * n, n, e) : rms_row(px + i * n, w, py + i * n, n, e);
      });
    });
    context->save_for_backward({x, weight, moments});
    context->saved_data["is_centered"] = is_centered;
    context->saved_data["has_bias"] = bias.defined();
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], g = grads[0].to(x.scalar_type()).contiguous();
    const bool is_centered = context->saved_data["is_centered"].toBool();
    const bool has_bias = context->saved_data["has_bias"].toBool();
    const int64_t n = weight.numel(), rows = x.numel() / n;
    const auto* moments = reinterpret_cast<const Moments*>(in<float>(saved[2]));
    at::Tensor dx = at::empty_like(x), sums = at::zeros({kRowBlocks, 2, n}, x.options().dtype(at::kFloat));
    by_dtype(x, [&](auto t) {
      using T = decltype(t);
      const T *pg = in<T>(g), *px = in<T>(x), *w = in<T>(weight);
      T* pdx = out<T>(dx);
      at::parallel_for(0, kRowBlocks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
          float *dw = out<float>(sums) + 2 * block * n, *db = dw + n;
          for (int64_t i = rows * block / kRowBlocks; i < rows * (block + 1) / kRowBlocks; ++i) {
            if (is_centered)
              layer_row_backward(pg + i * n, px + i * n, w, moments[i], pdx + i * n, dw, db, n);
            else
              rms_row_backward(pg + i * n, px + i * n, w, moments[i], pdx + i * n, dw, n);
          }
        }
      });
    });
    const at::Tensor total = sums.sum(0).to(weight.scalar_type());
    return {dx, total[0].clone(), has_bias ? total[1].clone() : at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

bool has_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto is_like_x = [&](const at::Tensor& t) { return t.is_cpu() && t.scalar_type() == x.scalar_type(); };
  return is_kernel_dtype(x) && is_like_x(weight) && (!bias.defined() || is_like_x(bias));
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double epsilon) {
  return NormFunction::apply(x, weight, bias.defined() ? std::optional(bias) : std::nullopt, epsilon, true);
}
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  return NormFunction::apply(x, weight, std::optional<at::Tensor>(), epsilon, false);
}

}  // namespace shardsmith::cpu
