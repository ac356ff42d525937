// A linear layer on the CPU together with what follows it: bias and GELU, or bias and residual, take one pass over the
// product; so do GELU's gradient and the sums that are the bias's.
#pragma once

#include <ATen/core/Tensor.h>

namespace shardsmith::cpu {

// True for tensors of one dtype, float32 or bfloat16, on the CPU, where no autocast changes the dtype.
bool has_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// x [..., in]; weight [in, out] where `in_out`, else [out, in]; bias [out] -> [..., out]. Differentiable.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool in_out);
// GELU by tanh of that.
at::Tensor linear_gelu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool in_out);
// That + residual [..., out].
at::Tensor linear_residual(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool in_out,
                           const at::Tensor& residual);

}  // namespace shardsmith::cpu
