// Fused kernels for the CPU: each is one pass over memory where the composition of torch's operations makes several.
// Differentiable. float32 and bfloat16, computed in float32; everything else takes the composition in functional.cc.
#pragma once

#include <ATen/core/Tensor.h>

namespace shardsmith::cpu {

// True if both are on the CPU and each is float32 or bfloat16.
bool has_kernel(const at::Tensor& a, const at::Tensor& b);

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up);  // silu(gate) * up, of one dtype
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos,
                  const at::Tensor& sin);  // x [B, S, n, d], float32 tables [P, d]

}  // namespace shardsmith::cpu
