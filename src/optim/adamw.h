// AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization") over parameter groups, one fused pass a group.
// Parameters in bfloat16 or float16 have masters in float32, which are what is updated; the parameter is its rounding.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace shardsmith {

struct AdamWGroup {
  std::vector<at::Tensor> parameters;
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0.01;
};

// One thread. Parameters stay the caller's; master and moments are made at a parameter's first step, in float32 (for
// float64 in float64).
class AdamW {
 public:
  struct State {
    at::Tensor master;  // undefined where the parameter itself is wide
    at::Tensor exp_avg, exp_avg_sq;
    at::Tensor step;  // float32 scalar
  };
  // Throws kInvalidArgument if a parameter is given twice, with the places of both.
  explicit AdamW(std::vector<AdamWGroup> groups);
  // Parameters without a gradient are passed over. Gradients count times `gradient_scale` (1 / loss scale, clipping).
  void step(double gradient_scale = 1);
  void zero_grad();
  std::vector<AdamWGroup>& groups() { return groups_; }
  // By group, then in the order of its parameters.
  std::vector<std::vector<State>>& states() { return states_; }

 private:
  std::vector<AdamWGroup> groups_;
  std::vector<std::vector<State>> states_;
};

}  // namespace shardsmith
