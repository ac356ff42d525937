// The small functions between a transformer's products. All differentiable, on any device; on the CPU some have a fused
// kernel (kernels_cpu.h) that gives the same values as the composition of torch's own operations.
#pragma once

#include <ATen/core/Tensor.h>

#include "family/description.h"

namespace shardsmith {

// x [..., H]; weight, bias [H] (bias undefined for RMSNorm). Statistics in float32 at least.
at::Tensor normalize(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, NormKind kind,
                     double epsilon);

at::Tensor activate(const at::Tensor& x, Activation activation);
// activation(gate) * up, elementwise.
at::Tensor gated(const at::Tensor& gate, const at::Tensor& up, Activation activation);

// Rotary embedding, half-split (Su et al., "RoFormer"; dimension i is paired with i + d/2).
// cos and sin [P, d] float32, each half twice.
struct RotaryTable {
  at::Tensor cos, sin;
};
RotaryTable make_rotary_table(const ModelDescription& description, int64_t positions, const at::TensorOptions& options);
// x [B, S, n, d]; positions [B, S] int64, or undefined for 0..S-1. Returns x's dtype and shape. Where the table is
// narrower than d, the dimensions beyond it pass unchanged.
at::Tensor rotate(const at::Tensor& x, const RotaryTable& table, const at::Tensor& positions);

}  // namespace shardsmith
