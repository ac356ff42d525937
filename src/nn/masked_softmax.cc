#include "nn/masked_softmax.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "nn/cpu_tensor.h"
#include "nn/vector_math.h"

namespace shardsmith {
namespace {

using elements::Bf16;
using elements::load;
using elements::store;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

template <typename T>
inline void softmax_loop(T* x, const float* mask, float scale, int64_t n) {
  float largest = kNothing;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, load(x[i]) * scale + (mask ? mask[i] : 0.0f));
  if (largest == kNothing) {
    std::fill(x, x + n, T{});
    return;
  }
  float sum = 0, strange = 0;  // 0 x infinity and not-a-number are not-a-number
#pragma omp simd reduction(+ : sum, strange)
  for (int64_t i = 0; i < n; ++i) {
    const float s = load(x[i]) * scale, d = s + (mask ? mask[i] : 0.0f) - largest;
    sum += vector_math::select(d > -87.0f, vector_math::exponential(d), 0.0f);
    strange += 0.0f * s;
  }
  const float factor = 1.0f / sum + strange;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float d = load(x[i]) * scale + (mask ? mask[i] : 0.0f) - largest;
    store(x[i], factor * vector_math::select(d > -87.0f, vector_math::exponential(d), 0.0f));
  }
}
template <typename T>
inline void gradient_loop(const T* g, const T* p, T* out, float scale, int64_t n) {
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < n; ++i) dot += load(g[i]) * load(p[i]);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(out[i], scale * load(p[i]) * (load(g[i]) - dot));
}

#define SHARDSMITH_MASKED_SOFTMAX(T)                                                                  \
  SHARDSMITH_VECTOR_CLONES void softmax_row(T* x, const float* mask, float scale, int64_t n) {        \
    softmax_loop(x, mask, scale, n);                                                                  \
  }                                                                                                   \
  SHARDSMITH_VECTOR_CLONES void gradient_row(const T* g, const T* p, T* to, float scale, int64_t n) { \
    gradient_loop(g, p, to, scale, n);                                                                \
  }
SHARDSMITH_MASKED_SOFTMAX(float)
SHARDSMITH_MASKED_SOFTMAX(Bf16)
#undef SHARDSMITH_MASKED_SOFTMAX

// Where row i of [B, n, S] has its mask, whose rows lie dense or are not there.
int64_t mask_row(const at::Tensor& mask, int64_t i, int64_t heads, int64_t sequence) {
  return i / (heads * sequence) * mask.stride(0) + i / sequence % heads * mask.stride(1) +
         i % sequence * mask.stride(2);
}

void softmax_in_place(const at::Tensor& x, const at::Tensor& mask, double scale) {
  const int64_t n = x.size(3), heads = x.size(1), sequence = x.size(2);
  const float* facts = mask.defined() ? cpu::in<float>(mask) : nullptr;
  cpu::by_dtype(x, [&](auto t) {
    using T = decltype(t);
    T* rows = cpu::out<T>(x);
    at::parallel_for(0, x.numel() / n, cpu::kGrain / n + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        softmax_row(rows + i * n, facts ? facts + mask_row(mask, i, heads, sequence) : nullptr,
                    static_cast<float>(scale), n);
    });
  });
}

struct MaskedSoftmax : torch::autograd::Function<MaskedSoftmax> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores, const std::optional<at::Tensor>& mask,
                            double scale) {
    at::Tensor rows;
    if (mask) {  // float32, with rows that can be walked
      rows = mask->to(at::kFloat);
      while (rows.dim() < 4) rows = rows.unsqueeze(0);
      if (rows.stride(-1) != 1 || rows.size(-1) != scores.size(-1))
        rows = rows.expand({rows.size(0), rows.size(1), rows.size(2), scores.size(-1)}).contiguous();
      rows = rows.expand(scores.sizes());
    }
    const at::Tensor p = scores.detach();
    softmax_in_place(p, rows, scale);
    context->mark_dirty({scores});
    context->saved_data["scale"] = scale;
    context->save_for_backward({scores});
    return scores;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const at::Tensor p = context->get_saved_variables()[0];
    const at::Tensor g = grads[0].to(p.scalar_type()).contiguous();
    at::Tensor out = at::empty_like(p);
    const auto scale = static_cast<float>(context->saved_data["scale"].toDouble());
    const int64_t n = p.size(3);
    cpu::by_dtype(p, [&](auto t) {
      using T = decltype(t);
      at::parallel_for(0, p.numel() / n, cpu::kGrain / n + 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          gradient_row(cpu::in<T>(g) + i * n, cpu::in<T>(p) + i * n, cpu::out<T>(out) + i * n, scale, n);
      });
    });
    return {out, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor masked_softmax(const at::Tensor& scores, const at::Tensor& mask, double scale) {
  if (!cpu::is_kernel_dtype(scores) || !scores.is_contiguous() || scores.numel() == 0)
    return masked_softmax_unfused(scores, mask, scale);
  at::Tensor x = scores;
  if (x.is_leaf() && x.requires_grad()) x = x.clone();
  return MaskedSoftmax::apply(x, mask.defined() ? std::optional(mask) : std::nullopt, scale);
}

at::Tensor masked_softmax_unfused(const at::Tensor& scores, const at::Tensor& mask, double scale) {
  at::Tensor wide = scores.scalar_type() == at::kDouble ? scores : scores.to(at::kFloat);
  wide = wide * scale;
  if (mask.defined()) wide = wide + mask;
  const at::Tensor empty = wide.detach().amax(-1, true).eq(kNothing);
  return at::softmax(wide.masked_fill(empty, 0), -1).masked_fill(empty, 0).to(scores.scalar_type());
}

}  // namespace shardsmith
