#include "nn/linear_cpu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "nn/cpu_tensor.h"
#include "nn/vector_math.h"

namespace shardsmith::cpu {
namespace {

using elements::Bf16;
using elements::load;
using elements::store;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Columns that are summed at a time: their float32 sums stay in the nearest cache.
constexpr int64_t kColumns = 2048;

template <typename T>
inline void add_residual_loop(T* y, const T* bias, const T* residual, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(y[i], load(y[i]) + load(bias[i]) + load(residual[i]));
}
template <typename T>
inline void gelu_loop(const T* z, const T* bias, T* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(y[i], vector_math::gelu_tanh(load(z[i]) + load(bias[i])));
}
// dz = g gelu'(z + b), sums += dz.
template <typename T>
inline void gelu_backward_loop(const T* g, const T* z, const T* bias, T* dz, float* sums, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float d = load(g[i]) * vector_math::gelu_tanh_slope(load(z[i]) + load(bias[i]));
    store(dz[i], d);
    sums[i] += d;
  }
}
template <typename T>
inline void add_to_sums_loop(const T* g, float* sums, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sums[i] += load(g[i]);
}

#define SHARDSMITH_ROWS(T)                                                                                            \
  SHARDSMITH_VECTOR_CLONES void add_residual(T* y, const T* bias, const T* residual, int64_t n) {                     \
    add_residual_loop(y, bias, residual, n);                                                                          \
  }                                                                                                                   \
  SHARDSMITH_VECTOR_CLONES void gelu(const T* z, const T* bias, T* y, int64_t n) { gelu_loop(z, bias, y, n); }        \
  SHARDSMITH_VECTOR_CLONES void gelu_backward(const T* g, const T* z, const T* bias, T* dz, float* sums, int64_t n) { \
    gelu_backward_loop(g, z, bias, dz, sums, n);                                                                      \
  }                                                                                                                   \
  SHARDSMITH_VECTOR_CLONES void add_to_sums(const T* g, float* sums, int64_t n) { add_to_sums_loop(g, sums, n); }
SHARDSMITH_ROWS(float)
SHARDSMITH_ROWS(Bf16)
#undef SHARDSMITH_ROWS

// Calls row(i) for each of `rows` rows of n elements.
template <typename F>
void for_rows(int64_t rows, int64_t n, const F& row) {
  at::parallel_for(0, rows, kGrain / n + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row(i);
  });
}

// The sum over rows of what part(row, column, count, sums) adds to `sums`, as a tensor [n] like `like`.
template <typename F>
at::Tensor sum_of_rows(int64_t rows, int64_t n, const at::Tensor& like, const F& part) {
  at::Tensor sums = at::zeros({kRowBlocks, n}, like.options().dtype(at::kFloat));
  float* all = out<float>(sums);
  at::parallel_for(0, kRowBlocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      for (int64_t column = 0; column < n; column += kColumns)
        for (int64_t i = rows * block / kRowBlocks; i < rows * (block + 1) / kRowBlocks; ++i)
          part(i, column, std::min(kColumns, n - column), all + block * n + column);
  });
  return sums.sum(0).to(like.scalar_type());
}

at::Tensor rows_of(const at::Tensor& t) { return t.reshape({-1, t.size(-1)}); }

at::Tensor product(const at::Tensor& x, const at::Tensor& weight, bool in_out) {
  return at::mm(rows_of(x), in_out ? weight : weight.t());
}

std::vector<int64_t> shape_of_result(const at::Tensor& x, int64_t columns) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = columns;
  return shape;
}

// Gradients of x and weight from that of the product, g [rows, out]. What nobody asks for is undefined.
variable_list product_backward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, bool in_out,
                               const at::Tensor& g) {
  at::Tensor dx, dw;
  if (context->needs_input_grad(0)) dx = at::mm(g, in_out ? weight.t() : weight).view(x.sizes());
  if (context->needs_input_grad(1)) dw = in_out ? at::mm(rows_of(x).t(), g) : at::mm(g.t(), rows_of(x));
  return {dx, dw};
}

at::Tensor bias_gradient(const at::Tensor& g) {
  at::Tensor result;
  by_dtype(g, [&](auto t) {
    using T = decltype(t);
    const int64_t n = g.size(1);
    const T* p = in<T>(g);
    result = sum_of_rows(g.size(0), n, g, [&](int64_t i, int64_t column, int64_t count, float* sums) {
      add_to_sums(p + i * n + column, sums, count);
    });
  });
  return result;
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, const std::optional<at::Tensor>& given_residual, bool in_out) {
    // A bias alone is left to the product, which rounds once.
    at::Tensor y;
    if (!given_residual) {
      y = at::addmm(bias, rows_of(x), in_out ? weight : weight.t());
    } else {
      y = product(x, weight, in_out);
      const at::Tensor residual = given_residual->contiguous();
      by_dtype(y, [&](auto t) {
        using T = decltype(t);
        for_rows(y.size(0), y.size(1), [&](int64_t i) {
          const int64_t at = i * y.size(1);
          add_residual(out<T>(y) + at, in<T>(bias), in<T>(residual) + at, y.size(1));
        });
      });
    }
    context->save_for_backward({x, weight});
    context->saved_data["in_out"] = in_out;
    context->saved_data["has_residual"] = given_residual.has_value();
    return y.view(shape_of_result(x, y.size(1)));
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], g = rows_of(grads[0].to(x.scalar_type())).contiguous();
    const variable_list both = product_backward(context, x, saved[1], context->saved_data["in_out"].toBool(), g);
    return {both[0], both[1], context->needs_input_grad(2) ? bias_gradient(g) : at::Tensor(),
            context->saved_data["has_residual"].toBool() ? grads[0] : at::Tensor(), at::Tensor()};
  }
};

struct LinearGelu : torch::autograd::Function<LinearGelu> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, bool in_out) {
    const at::Tensor z = product(x, weight, in_out), y = at::empty_like(z);
    const int64_t n = z.size(1);
    by_dtype(z, [&](auto t) {
      using T = decltype(t);
      for_rows(z.size(0), n, [&](int64_t i) { gelu(in<T>(z) + i * n, in<T>(bias), out<T>(y) + i * n, n); });
    });
    context->save_for_backward({x, weight, bias, z});
    context->saved_data["in_out"] = in_out;
    return y.view(shape_of_result(x, n));
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &bias = saved[2], &z = saved[3], dz = at::empty_like(z);
    const at::Tensor g = rows_of(grads[0].to(z.scalar_type())).contiguous();
    at::Tensor db;
    by_dtype(z, [&](auto t) {
      using T = decltype(t);
      const T *pg = in<T>(g), *pz = in<T>(z), *b = in<T>(bias);
      T* pd = out<T>(dz);
      const int64_t n = z.size(1);
      db = sum_of_rows(z.size(0), n, bias, [&](int64_t i, int64_t column, int64_t count, float* sums) {
        const int64_t at = i * n + column;
        gelu_backward(pg + at, pz + at, b + column, pd + at, sums, count);
      });
    });
    const variable_list both = product_backward(context, x, saved[1], context->saved_data["in_out"].toBool(), dz);
    return {both[0], both[1], db, at::Tensor()};
  }
};

}  // namespace

bool has_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto is_like_x = [&](const at::Tensor& t) { return t.is_cpu() && t.scalar_type() == x.scalar_type(); };
  return is_kernel_dtype(x) && bias.defined() && x.numel() > 0 && is_like_x(weight) && is_like_x(bias) &&
         !at::autocast::is_autocast_enabled(at::kCPU);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool in_out) {
  return LinearFunction::apply(x, weight, bias, std::optional<at::Tensor>(), in_out);
}
at::Tensor linear_gelu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool in_out) {
  return LinearGelu::apply(x, weight, bias, in_out);
}
at::Tensor linear_residual(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool in_out,
                           const at::Tensor& residual) {
  return LinearFunction::apply(x, weight, bias, std::optional(residual), in_out);
}

}  // namespace shardsmith::cpu
