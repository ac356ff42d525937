// Activation checkpointing: a part of the model keeps its input only, and is computed once more when its backward is
// due (Chen et al., "Training deep nets with sublinear memory cost").
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace shardsmith {

// What of one layer is computed again.
struct ActivationCheckpoint {
  // Not negative: the layer as a whole, together with neighbours of the same number on the same stage.
  int64_t segment = -1;
  // Else its residual branches, each by itself.
  bool attention = false, output = false;
};

// compute(x), whose graph lives only while its backward runs. `compute` must give the same bits again, wherever and
// whenever it is called; parameters that it uses get their gradients from there, `trainable` says whether there are
// any. Autocast is as it was the first time. Without grad mode it is just compute(x).
at::Tensor checkpointed(const at::Tensor& x, std::function<at::Tensor(const at::Tensor&)> compute, bool trainable);

}  // namespace shardsmith
