#include "nn/kernels_cpu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <bit>
#include <cmath>
#include <cstdint>

// The loops below are plain; the compiler makes a copy of each for every vector width and picks one at load time.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SHARDSMITH_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SHARDSMITH_CLONES
#endif

namespace shardsmith::cpu {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Bf16 {
  uint16_t bits;
};
inline float load(float x) { return x; }
inline float load(Bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline void store(float& to, float x) { to = x; }
inline void store(Bf16& to, float x) {  // to nearest even
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  to.bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// exp by 2^n * polynomial, |relative error| < 2e-7 (Cephes' expf, Moshier); written so that it vectorizes.
inline float exponential(float x) {
  x = std::min(88.0f, std::max(-87.0f, x));
  const float n = std::floor(x * 1.44269504f + 0.5f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
}
inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// One row: y = w * x * r with r = 1 / sqrt(mean(x^2) + epsilon); returns r.
SHARDSMITH_CLONES float rms_row(const float* x, const float* w, float* y, int64_t n, float epsilon) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  const float r = 1.0f / std::sqrt(sum / static_cast<float>(n) + epsilon);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = w[i] * (x[i] * r);
  return r;
}

// dx = r * (g w - x r^2 mean(g w x)), dw += g x r.
SHARDSMITH_CLONES void rms_row_backward(const float* g, const float* x, const float* w, float r, float* dx, float* dw,
                                        int64_t n) {
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < n; ++i) dot += g[i] * w[i] * x[i];
  const float mean = dot * r * r / static_cast<float>(n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    dx[i] = r * (g[i] * w[i] - x[i] * mean);
    dw[i] += g[i] * x[i] * r;
  }
}

template <typename T>
inline void silu_mul_loop(const T* gate, const T* up, T* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float a = load(gate[i]);
    store(y[i], a * sigmoid(a) * load(up[i]));
  }
}
template <typename T>
inline void silu_mul_backward_loop(const T* g, const T* gate, const T* up, T* dgate, T* dup, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float a = load(gate[i]), s = sigmoid(a), grad = load(g[i]);
    store(dup[i], grad * a * s);
    store(dgate[i], grad * load(up[i]) * s * (1.0f + a * (1.0f - s)));
  }
}
SHARDSMITH_CLONES void silu_mul_run(const float* a, const float* b, float* y, int64_t n) { silu_mul_loop(a, b, y, n); }
SHARDSMITH_CLONES void silu_mul_run(const Bf16* a, const Bf16* b, Bf16* y, int64_t n) { silu_mul_loop(a, b, y, n); }
SHARDSMITH_CLONES void silu_mul_backward_run(const float* g, const float* a, const float* b, float* da, float* db,
                                             int64_t n) {
  silu_mul_backward_loop(g, a, b, da, db, n);
}
SHARDSMITH_CLONES void silu_mul_backward_run(const Bf16* g, const Bf16* a, const Bf16* b, Bf16* da, Bf16* db,
                                             int64_t n) {
  silu_mul_backward_loop(g, a, b, da, db, n);
}

// One position of all heads. sign = 1 turns forward, -1 back (the transpose of a rotation is its inverse).
template <typename T>
inline void rotate_loop(const T* x, const float* cos, const float* sin, float sign, T* y, int64_t heads, int64_t half) {
  for (int64_t h = 0; h < heads; ++h, x += 2 * half, y += 2 * half) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const float a = load(x[i]), b = load(x[i + half]), c = cos[i], s = sign * sin[i];
      store(y[i], a * c - b * s);
      store(y[i + half], b * c + a * s);
    }
  }
}
SHARDSMITH_CLONES void rotate_run(const float* x, const float* c, const float* s, float sign, float* y, int64_t heads,
                                  int64_t half) {
  rotate_loop(x, c, s, sign, y, heads, half);
}
SHARDSMITH_CLONES void rotate_run(const Bf16* x, const float* c, const float* s, float sign, Bf16* y, int64_t heads,
                                  int64_t half) {
  rotate_loop(x, c, s, sign, y, heads, half);
}

template <typename T>
const T* in(const at::Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <typename T>
T* out(const at::Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Calls f with a float or a Bf16, by the tensor's dtype.
template <typename F>
void by_dtype(const at::Tensor& t, const F& f) {
  t.scalar_type() == at::kFloat ? f(float{}) : f(Bf16{});
}

constexpr int64_t kGrain = 1 << 14;  // elements a thread should have at least

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_in, const at::Tensor& weight,
                            double epsilon) {
    const at::Tensor x = x_in.contiguous();
    const int64_t n = weight.numel(), rows = x.numel() / n;
    at::Tensor y = at::empty_like(x), scale = at::empty({rows}, x.options());
    const float *px = in<float>(x), *pw = in<float>(weight);
    float *py = out<float>(y), *ps = out<float>(scale);
    at::parallel_for(0, rows, kGrain / n + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ps[i] = rms_row(px + i * n, pw, py + i * n, n, static_cast<float>(epsilon));
    });
    context->save_for_backward({x, weight, scale});
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], g = grads[0].to(at::kFloat).contiguous();
    const int64_t n = weight.numel(), rows = x.numel() / n;
    // Fixed blocks of rows, summed in order: the same bits for any number of threads.
    const int64_t blocks = std::min<int64_t>(rows, 8);
    at::Tensor dx = at::empty_like(x), dw = at::zeros({std::max<int64_t>(blocks, 1), n}, weight.options());
    const float *pg = in<float>(g), *px = in<float>(x), *pw = in<float>(weight), *ps = in<float>(saved[2]);
    float *pdx = out<float>(dx), *pdw = out<float>(dw);
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b)
        for (int64_t i = rows * b / blocks; i < rows * (b + 1) / blocks; ++i)
          rms_row_backward(pg + i * n, px + i * n, pw, ps[i], pdx + i * n, pdw + b * n, n);
    });
    return {dx, dw.sum(0), at::Tensor()};
  }
};

struct SiluMul : torch::autograd::Function<SiluMul> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate_in, const at::Tensor& up_in) {
    const at::Tensor gate = gate_in.contiguous(), up = up_in.contiguous();
    at::Tensor y = at::empty_like(gate);
    by_dtype(gate, [&](auto t) {
      using T = decltype(t);
      at::parallel_for(0, gate.numel(), kGrain, [&](int64_t begin, int64_t end) {
        silu_mul_run(in<T>(gate) + begin, in<T>(up) + begin, out<T>(y) + begin, end - begin);
      });
    });
    context->save_for_backward({gate, up});
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1], g = grads[0].to(gate.scalar_type()).contiguous();
    at::Tensor dgate = at::empty_like(gate), dup = at::empty_like(up);
    by_dtype(gate, [&](auto t) {
      using T = decltype(t);
      at::parallel_for(0, gate.numel(), kGrain, [&](int64_t begin, int64_t end) {
        silu_mul_backward_run(in<T>(g) + begin, in<T>(gate) + begin, in<T>(up) + begin, out<T>(dgate) + begin,
                              out<T>(dup) + begin, end - begin);
      });
    });
    return {dgate, dup};
  }
};

at::Tensor rotated(const at::Tensor& x_in, const at::Tensor& cos, const at::Tensor& sin, float sign) {
  const at::Tensor x = x_in.contiguous();
  const int64_t sequence = x.size(1), heads = x.size(2), d = x.size(3), row = heads * d;
  at::Tensor y = at::empty_like(x);
  by_dtype(x, [&](auto t) {
    using T = decltype(t);
    at::parallel_for(0, x.size(0) * sequence, kGrain / row + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t angle = (i % sequence) * d;
        rotate_run(in<T>(x) + i * row, in<float>(cos) + angle, in<float>(sin) + angle, sign, out<T>(y) + i * row, heads,
                   d / 2);
      }
    });
  });
  return y;
}

struct Rotate : torch::autograd::Function<Rotate> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin) {
    context->save_for_backward({cos, sin});
    return rotated(x, cos, sin, 1.0f);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    return {rotated(grads[0], saved[0], saved[1], -1.0f), at::Tensor(), at::Tensor()};
  }
};

bool is_kernel_dtype(const at::Tensor& t) {
  return t.device().is_cpu() && (t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16);
}

}  // namespace

bool has_kernel(const at::Tensor& a, const at::Tensor& b) { return is_kernel_dtype(a) && is_kernel_dtype(b); }

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  return RmsNorm::apply(x, weight, epsilon);
}
at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) { return SiluMul::apply(gate, up); }
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  return Rotate::apply(x, cos, sin);
}

}  // namespace shardsmith::cpu
