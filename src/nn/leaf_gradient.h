// Gradients that are added where they belong, for weights so large that one more copy of them a microbatch is dear.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>

namespace shardsmith {

// Somebody listens to this tensor's gradient (a hook, retain_grad), or it is no leaf: its gradient has to come by
// autograd's own way.
bool is_watched(const at::Tensor& weight);

// Memory for one large tensor that is used again and again: as large as it is, malloc would map its pages anew each
// time. Any thread.
class SpareTensor {
 public:
  // Uninitialised, of these sizes and options, without a graph.
  at::Tensor take(at::IntArrayRef sizes, const at::TensorOptions& options);
  // What others go on using is taken again when nobody holds it, or its memory, any more.
  void give_back(at::Tensor tensor);

 private:
  std::mutex mutex_;
  at::Tensor spare_;
};

}  // namespace shardsmith
