#include "nn/leaf_gradient.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

namespace shardsmith {

bool is_watched(const at::Tensor& weight) {
  if (!weight.is_leaf() || weight.retains_grad()) return true;
  return !torch::autograd::impl::hooks(weight).empty() || torch::autograd::impl::post_acc_grad_hooks(weight) != nullptr;
}

at::Tensor SpareTensor::take(const at::Tensor& weight) {
  std::lock_guard lock(mutex_);
  at::Tensor taken = std::move(spare_);
  spare_ = at::Tensor();
  const bool fits = taken.defined() && taken.sizes() == weight.sizes() && taken.options().type_equal(weight.options());
  return fits ? taken : at::empty(weight.sizes(), weight.options().requires_grad(false));
}

void SpareTensor::give_back(at::Tensor tensor) {
  std::lock_guard lock(mutex_);
  spare_ = std::move(tensor);
}

}  // namespace shardsmith
