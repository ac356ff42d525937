// The one transformer, computed from a ModelDescription: the part of it that one pipeline stage holds.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "family/family.h"
#include "layout/partition.h"
#include "nn/dropout.h"
#include "nn/functional.h"
#include "nn/leaf_gradient.h"
#include "nn/parameters.h"

namespace shardsmith {

// What a microbatch brings, the same on every stage.
struct Inputs {
  at::Tensor input_ids;       // [B, S] int64
  at::Tensor attention_mask;  // [B, S], 1 = attended, or undefined
  at::Tensor position_ids;    // [B, S] int64, or undefined for 0..S-1
  at::Tensor labels;          // [B, S] int64, or undefined
};

// Pre-norm attention and feed-forward of one block. Computes this rank's part; with one tensor-parallel rank that is
// all.
class Block {
 public:
  Block(const ModelDescription& description, const Parameters& parameters, int64_t layer);
  // x [B, S, H] -> [B, S, H]. mask: undefined (causal only) or bool [B, 1, S, S], true = attended.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask, const at::Tensor& positions,
                     const RotaryTable& rotary, const DropoutContext& dropout) const;

 private:
  at::Tensor attend(const at::Tensor& x, const at::Tensor& mask, const at::Tensor& positions, const RotaryTable& rotary,
                    const DropoutContext& dropout) const;
  at::Tensor feed_forward(const at::Tensor& x) const;

  ModelDescription description_;
  int64_t layer_;
  double scale_;
  at::Tensor attention_norm_weight_, attention_norm_bias_, output_norm_weight_, output_norm_bias_;
  std::vector<Linear> qkv_;  // one fused or three
  Linear dense_;
  std::vector<Linear> in_;  // gate and up, or dense1
  Linear out_;              // down, or dense2
};

// Blocks [first, last) with the embedding in front (stage 0) and the final norm and head behind (last stage).
// forward functions may be called from any thread, one at a time.
class StageModel {
 public:
  StageModel(const FamilyModel& model, const Partition& partition, int stage, const Parameters& parameters);
  bool has_embedding() const { return word_embedding_.defined(); }
  bool has_head() const { return head_.defined(); }

  // x: hidden states from the stage before, undefined where has_embedding(). Returns this stage's hidden states
  // [B, S, H], after the final norm where has_head().
  at::Tensor forward(const at::Tensor& x, const Inputs& inputs, const DropoutContext& dropout) const;
  at::Tensor loss(const at::Tensor& hidden, const at::Tensor& labels) const;  // scalar
  at::Tensor logits(const at::Tensor& hidden) const;                          // [B, S, V]

 private:
  at::Tensor embed(const Inputs& inputs, const DropoutContext& dropout) const;

  ModelDescription description_;
  at::Tensor word_embedding_, position_embedding_;
  std::vector<Block> blocks_;
  at::Tensor norm_weight_, norm_bias_, head_;
  RotaryTable rotary_;
  std::unique_ptr<SpareTensor> head_gradient_ = std::make_unique<SpareTensor>();
};

}  // namespace shardsmith
