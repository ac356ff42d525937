// How the CPU's kernels reach a tensor's elements.
#pragma once

#include <ATen/core/Tensor.h>

#include "nn/elements.h"

namespace shardsmith::cpu {

template <typename T>
const T* in(const at::Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <typename T>
T* out(const at::Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Calls f with a float or a Bf16, by the tensor's dtype, which is one of the two.
template <typename F>
void by_dtype(const at::Tensor& t, const F& f) {
  t.scalar_type() == at::kFloat ? f(float{}) : f(elements::Bf16{});
}

inline constexpr int64_t kGrain = 1 << 14;  // elements a thread should have at least

// Sums over rows are made of blocks of rows, which are then summed in order: the same bits for any number of threads.
inline constexpr int64_t kRowBlocks = 8;

inline bool is_kernel_dtype(const at::Tensor& t) {
  return t.is_cpu() && (t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16);
}

}  // namespace shardsmith::cpu
