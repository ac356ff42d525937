#include "nn/kernels_cpu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include "nn/cpu_tensor.h"
#include "nn/vector_math.h"

namespace shardsmith::cpu {
namespace {

using elements::Bf16;
using elements::load;
using elements::store;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using vector_math::sigmoid;

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
SHARDSMITH_VECTOR_CLONES void silu_mul_run(const float* a, const float* b, float* y, int64_t n) {
  silu_mul_loop(a, b, y, n);
}
SHARDSMITH_VECTOR_CLONES void silu_mul_run(const Bf16* a, const Bf16* b, Bf16* y, int64_t n) {
  silu_mul_loop(a, b, y, n);
}
SHARDSMITH_VECTOR_CLONES void silu_mul_backward_run(const float* g, const float* a, const float* b, float* da,
                                                    float* db, int64_t n) {
  silu_mul_backward_loop(g, a, b, da, db, n);
}
SHARDSMITH_VECTOR_CLONES void silu_mul_backward_run(const Bf16* g, const Bf16* a, const Bf16* b, Bf16* da, Bf16* db,
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
SHARDSMITH_VECTOR_CLONES void rotate_run(const float* x, const float* c, const float* s, float sign, float* y,
                                         int64_t heads, int64_t half) {
  rotate_loop(x, c, s, sign, y, heads, half);
}
SHARDSMITH_VECTOR_CLONES void rotate_run(const Bf16* x, const float* c, const float* s, float sign, Bf16* y,
                                         int64_t heads, int64_t half) {
  rotate_loop(x, c, s, sign, y, heads, half);
}

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

}  // namespace

bool has_kernel(const at::Tensor& a, const at::Tensor& b) { return is_kernel_dtype(a) && is_kernel_dtype(b); }

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) { return SiluMul::apply(gate, up); }
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  return Rotate::apply(x, cos, sin);
}

}  // namespace shardsmith::cpu
