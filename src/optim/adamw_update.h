// One AdamW update that touches each byte once: gradient, master and both moments are read, master, moments and the
// rounded parameter are written, in one pass over memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace shardsmith {

struct AdamWScalars {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0.01;
  // On every gradient: 1 / loss scale, times what clipping makes of it.
  double gradient_scale = 1.0;
};

// One parameter's tensors, all on the CPU, of one shape.
struct AdamWTensors {
  at::Tensor gradient;             // float32, bfloat16 or float16
  at::Tensor master;               // float32
  at::Tensor exp_avg, exp_avg_sq;  // float32
  at::Tensor rounded;              // bfloat16 or float16: becomes the rounded master; undefined: none
  double step = 1;                 // of this update, from 1
};

// master *= 1 - lr weight_decay; m += (1 - beta1)(g - m); v = beta2 v + (1 - beta2) g^2;
// master -= lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + epsilon), in float32, in the order of operations of
// torch.optim.AdamW(fused=True) (Loshchilov and Hutter, "Decoupled Weight Decay Regularization").
// Uses torch's threads; the result doesn't depend on how many. Throws kInvalidArgument for tensors that don't belong
// together.
void adamw_update(const std::vector<AdamWTensors>& parameters, const AdamWScalars& scalars);

}  // namespace shardsmith
