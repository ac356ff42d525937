// The one transformer, computed from a ModelDescription: the part of it that one pipeline stage holds.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "family/family.h"
#include "layout/partition.h"
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
  at::Tensor labels;          // [B, S] int64, or undefined
};

// Blocks [first, last) with the embedding in front (stage 0) and the final norm and head behind (last stage): this
// tensor-parallel rank's part of them. forward functions may be called from any thread, one at a time; all tp ranks
// call the same ones in the same order.
class StageModel {
 public:
  // `model` is the whole one, `parameters` are this rank's; `ranks` must outlive it. `own_batch`: every tp rank brought
  // an equal part of the batch, and wants the loss and logits of its own.
  StageModel(const FamilyModel& model, const Partition& partition, int stage, const Parameters& parameters,
             const TensorParallel& ranks, bool own_batch);
  bool has_embedding() const { return word_embedding_.defined(); }
  bool has_head() const { return head_.defined(); }

  // x: hidden states from the stage before, undefined where has_embedding(). Returns this stage's hidden states
  // [B, positions, H], of the positions that the rank keeps, after the final norm where has_head().
  at::Tensor forward(const at::Tensor& x, const Inputs& inputs, const DropoutContext& dropout) const;
  // What forward takes and gives between stages.
  std::vector<int64_t> hidden_shape(const Inputs& inputs) const;
  at::Tensor loss(const at::Tensor& hidden, const at::Tensor& labels) const;  // scalar
  at::Tensor logits(const at::Tensor& hidden, const Inputs& inputs) const;    // [B, S, V], of its own samples
  at::Tensor looked_up(const Inputs& inputs) const;  // rows of the embedding's own part that a forward uses, [n]

 private:
  at::Tensor embed(const Inputs& inputs, const DropoutContext& dropout) const;

  ModelDescription description_;
  const TensorParallel& ranks_;
  bool own_batch_;
  int64_t first_row_ = 0;  // of the vocabulary
  at::Tensor word_embedding_, position_embedding_;
  std::vector<Block> blocks_;
  at::Tensor norm_weight_, norm_bias_, head_;
  RotaryTable rotary_;
  std::unique_ptr<SpareTensor> head_gradient_ = std::make_unique<SpareTensor>();
};

}  // namespace shardsmith
