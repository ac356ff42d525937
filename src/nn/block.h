// Attention and feed-forward of one block: this tensor-parallel rank's heads and its part of the MLP.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "family/description.h"
#include "nn/activation_checkpoint.h"
#include "nn/dropout.h"
#include "nn/functional.h"
#include "nn/parameters.h"
#include "nn/switches.h"
#include "nn/tensor_parallel.h"

namespace shardsmith {

// What all blocks of a stage are told of a microbatch.
struct BlockContext {
  int64_t sequence = 0;  // positions of the whole sequence
  at::Tensor mask;       // undefined (all seen, or causal only) or bool [B, 1, S, S], true = attended
  at::Tensor positions;  // [B, S] int64, or undefined for 0..S-1
  const RotaryTable* rotary = nullptr;
  DropoutContext dropout;
};

// `norm`, which every rank holds whole, of the hidden states that the rank keeps.
at::Tensor normalize(const at::Tensor& x, const Norm& norm, const ModelDescription& description,
                     const TensorParallel& ranks);

class Block {
 public:
  // `ranks` must outlive it.
  Block(const ModelDescription& description, const Parameters& parameters, int64_t layer, const TensorParallel& ranks,
        const BlockSwitches& switches = {});
  // x [B, ranks.positions(S).count, H] -> the same shape. Branches that `checkpoint` names are checkpointed.
  at::Tensor forward(const at::Tensor& x, const BlockContext& context, const ActivationCheckpoint& checkpoint) const;
  bool is_trainable() const { return attention_is_trainable() || output_is_trainable(); }

 private:
  bool attention_is_trainable() const;
  bool output_is_trainable() const;
  // What is added to the residual stream; or where a `residual` is given (see adds_residual), the sum with it.
  at::Tensor attention_branch(const at::Tensor& x, const BlockContext& context, const at::Tensor& residual) const;
  at::Tensor output_branch(const at::Tensor& x, const BlockContext& context, const at::Tensor& residual) const;
  at::Tensor attention_alone(const at::Tensor& x, const BlockContext& context) const;
  at::Tensor output_alone(const at::Tensor& x, const BlockContext& context) const;
  // x and its branch.
  at::Tensor attention_sum(const at::Tensor& x, const BlockContext& context) const;
  at::Tensor output_sum(const at::Tensor& x, const BlockContext& context) const;
  bool adds_residual(const Linear& last, const at::Tensor& x, const BlockContext& context) const;
  at::Tensor normed(const at::Tensor& x, const Norm& norm) const;
  // What a branch is given: normed, where norms come first.
  at::Tensor before(const at::Tensor& x, const Norm& norm) const;
  // What the branch's last product is of.
  at::Tensor attended(const at::Tensor& x, const BlockContext& context) const;
  at::Tensor activated(const at::Tensor& x, const BlockContext& context) const;
  // x and a branch, with dropout, in the residual stream's type.
  at::Tensor sum(const at::Tensor& x, const at::Tensor& branch) const;
  bool fuses_dropout(const at::Tensor& x, const BlockContext& context) const;
  at::Tensor fused_sum(const at::Tensor& x, const Linear& last, const at::Tensor& in, int which,
                       const BlockContext& context) const;
  at::Tensor scores_and_sum(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const BlockContext& context) const;
  at::Tensor hidden_dropout(const at::Tensor& x, int which, const BlockContext& context) const;
  // The second product of a pair: each rank's summand, summed, and the bias once.
  at::Tensor by_rows(const Linear& linear, const at::Tensor& x, const at::Tensor& residual) const;

  ModelDescription description_;
  int64_t layer_;
  const TensorParallel& ranks_;
  int64_t heads_, kv_heads_;  // this rank's
  int kv_copies_ = 1;         // ranks that hold the same KV head
  double scale_;
  Norm attention_norm_, output_norm_;
  std::vector<Linear> qkv_;  // one fused or three
  Linear dense_;
  std::vector<Linear> in_;  // gate and up, or dense1
  Linear out_;              // down, or dense2
  BlockSwitches switches_;
  at::Tensor slopes_;  // of this rank's heads, where there is ALiBi
};

}  // namespace shardsmith
