// The one transformer, computed from a ModelDescription: the part of it that one pipeline stage holds.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "family/family.h"
#include "layout/partition.h"
#include "nn/activation_checkpoint.h"
#include "nn/block.h"
#include "nn/dropout.h"
#include "nn/functional.h"
#include "nn/leaf_gradient.h"
#include "nn/parameters.h"
#include "nn/tensor_parallel.h"

namespace shardsmith {

// What a microbatch brings, the same on every stage.
struct Inputs {
  at::Tensor input_ids;       // [B, S] int64
  at::Tensor attention_mask;  // [B, S], 1 = attended, or undefined
  at::Tensor position_ids;    // [B, S] int64, or undefined for 0..S-1
  at::Tensor labels;          // [B, S] int64, of a classification [B] or [B, num_labels]; or undefined
  at::Tensor token_type_ids;  // [B, S] int64, or undefined for 0
};

// Blocks [first, last) with the embedding in front (stage 0) and the final norm and head behind (last stage): this
// tensor-parallel rank's part of them. forward functions may be called from any thread, one at a time; all tp ranks
// call the same ones in the same order.
class StageModel {
 public:
  // `model` is the whole one, `parameters` are this rank's; `ranks` must outlive it. `own_batch`: every tp rank brought
  // an equal part of the batch, and wants the loss and logits of its own.
  StageModel(const FamilyModel& model, const Partition& partition, int stage, const Parameters& parameters,
             const TensorParallel& ranks, bool own_batch, const BlockSwitches& switches = {});
  // By layer of the whole model; empty: none. Not while a microbatch is between its forward and its backward.
  void set_activation_checkpointing(const std::vector<ActivationCheckpoint>& layers);
  // `ready(place)` is called during each backward, on its thread, when the gradients of all parameters at `place` (see
  // FamilyTensor) and behind are made. Not for the place with which a backward ends.
  void on_gradients(std::function<void(int place)> ready) { on_gradients_ = std::move(ready); }
  bool has_embedding() const { return word_embedding_.defined(); }
  bool is_last() const { return is_last_; }

  // x: hidden states from the stage before, undefined where has_embedding(). Returns this stage's hidden states
  // [B, positions, H], of the positions that the rank keeps, after the final norm where is_last().
  at::Tensor forward(const at::Tensor& x, const Inputs& inputs, const DropoutContext& dropout) const;
  // What forward takes and gives between stages.
  std::vector<int64_t> hidden_shape(const Inputs& inputs) const;
  // Of the rank's own samples, from what forward returned on the last stage. The loss is a scalar; the output is what
  // the model has for logits: [B, S, V], [B, num_labels], or where there is no head the hidden states [B, S, H].
  // The loss is to be backpropagated with a gradient that holds `loss_scale` (see LossOptions::scale).
  at::Tensor loss(const at::Tensor& hidden, const Inputs& inputs, const DropoutContext& dropout,
                  double loss_scale = 1) const;
  at::Tensor output(const at::Tensor& hidden, const Inputs& inputs, const DropoutContext& dropout) const;
  bool has_pooler() const { return pooler_.weight.defined(); }
  at::Tensor pooled(const at::Tensor& hidden, const Inputs& inputs) const;  // [B, H], of its own samples
  at::Tensor looked_up(const Inputs& inputs) const;  // rows of the embedding's own part that a forward uses, [n]

 private:
  // h, the input of what follows at `place`.
  at::Tensor watched(const at::Tensor& h, int64_t place) const;
  at::Tensor run_blocks(at::Tensor h, const BlockContext& context) const;
  at::Tensor embed(const Inputs& inputs, const DropoutContext& dropout) const;
  at::Tensor normed(const at::Tensor& x, const Norm& norm) const { return normalize(x, norm, description_, ranks_); }
  at::Tensor transformed(const at::Tensor& hidden) const;  // by the head's transform, if it has one
  at::Tensor pooled_of_all(const at::Tensor& hidden, const Inputs& inputs) const;
  at::Tensor classification_loss(const at::Tensor& logits, at::Tensor labels) const;
  at::Tensor own(const at::Tensor& x) const { return own_batch_ ? ranks_.own_rows(x) : x; }

  ModelDescription description_;
  const TensorParallel& ranks_;
  bool own_batch_;
  bool wide_stream_ = false;  // hidden states between layers are float32 whatever the parameters are
  int64_t first_row_ = 0;     // of the vocabulary
  bool is_last_ = false;
  at::Tensor word_embedding_, position_embedding_, token_type_embedding_;
  int64_t first_layer_ = 0;
  std::vector<Block> blocks_;
  std::vector<ActivationCheckpoint> checkpoints_;  // of the blocks
  std::function<void(int place)> on_gradients_;
  Norm embedding_norm_, norm_, head_norm_;
  at::Tensor head_, head_bias_;
  Linear head_transform_, pooler_, classifier_;
  RotaryTable rotary_;
  std::unique_ptr<SpareTensor> head_gradient_ = std::make_unique<SpareTensor>();
  std::unique_ptr<SpareTensor> logits_ = std::make_unique<SpareTensor>();
};

}  // namespace shardsmith
