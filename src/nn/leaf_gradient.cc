#include "nn/leaf_gradient.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

namespace shardsmith {

bool is_watched(const at::Tensor& weight) {
  if (!weight.is_leaf() || weight.retains_grad()) return true;
  return !torch::autograd::impl::hooks(weight).empty() || torch::autograd::impl::post_acc_grad_hooks(weight) != nullptr;
}

at::Tensor SpareTensor::take(at::IntArrayRef sizes, const at::TensorOptions& options) {
  std::lock_guard lock(mutex_);
  if (spare_.defined() && spare_.use_count() == 1 && spare_.storage().use_count() == 1) {
    at::Tensor taken = std::move(spare_);
    spare_ = at::Tensor();
    if (taken.sizes() == sizes && taken.options().type_equal(options)) return taken;
  }
  return at::empty(sizes, options.requires_grad(false));
}

void SpareTensor::give_back(at::Tensor tensor) {
  std::lock_guard lock(mutex_);
  spare_ = std::move(tensor);
}

}  // namespace shardsmith
