// Gradients that are added where they belong, for weights so large that one more copy of them a microbatch is dear.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>

namespace shardsmith {

// Somebody listens to this tensor's gradient (a hook, retain_grad), or it is no leaf: its gradient has to come by
// autograd's own way.
bool is_watched(const at::Tensor& weight);

// Memory of one weight's size that is used again and again. Any thread.
class SpareTensor {
 public:
  // Uninitialised, like `weight`, without a graph.
  at::Tensor take(const at::Tensor& weight);
  void give_back(at::Tensor tensor);

 private:
  std::mutex mutex_;
  at::Tensor spare_;
};

}  // namespace shardsmith
