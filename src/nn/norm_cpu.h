// LayerNorm and RMSNorm on the CPU, a pass over memory each way.
#pragma once

#include <ATen/core/Tensor.h>

namespace shardsmith::cpu {

// True for x and parameters of one dtype, float32 or bfloat16, on the CPU. `bias` may be undefined.
bool has_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// x [..., H], weight and bias [H]; computed in float32, rounded once. Differentiable.
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double epsilon);
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon);

}  // namespace shardsmith::cpu
