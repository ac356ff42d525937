// What the tensor-parallel ranks of one stage do together. A layer's first product is split by columns of its output,
// its second by rows of its input (Shoeybi et al., "Megatron-LM"): between `enter` and `leave` each rank computes its
// own heads, or its own part of the MLP.
//
//                    enter                        leave
//   whole sequences  as it is / sum               sum / as it is               (optimize = "speed")
//   split sequences  gather / scatter the sum     scatter the sum / gather     (optimize = "memory")
//
// (forward / backward.) With split sequences every rank keeps and normalizes 1 / size of the positions (Korthikanti et
// al., "Reducing activation recomputation"), and what all ranks hold whole has its gradient summed.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "comm/group.h"

namespace shardsmith {

// Free to use from any thread, one at a time, in the same order on every rank of the group. Must outlive the graphs.
class TensorParallel {
 public:
  TensorParallel() = default;  // one rank: every function gives back what it is given
  TensorParallel(const std::optional<Group>& group, bool split_sequence);

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool splits_sequence() const { return split_sequence_; }

  // Of a sequence of `length`, the positions whose hidden states this rank keeps: [begin, begin + count). All of them
  // where sequences are whole. The last ranks may have fewer, or none.
  struct Positions {
    int64_t begin = 0, count = 0;
  };
  Positions positions(int64_t length) const;

  // x [B, positions(length).count, H] -> [B, length, H].
  at::Tensor enter(const at::Tensor& x, int64_t length) const;
  // x [B, length, H], this rank's summand -> [B, positions(length).count, H].
  at::Tensor leave(const at::Tensor& x) const;

  // x [B, positions(length).count, H] -> [B, length, H], for what every rank then computes alike: backward keeps this
  // rank's positions of the gradient, which is the same everywhere.
  at::Tensor gather(const at::Tensor& x, int64_t length) const;

  // A weight that `copies` neighbouring ranks hold whole: its gradient is summed over them.
  at::Tensor shared(const at::Tensor& weight, int copies) const;
  // A weight that every rank holds whole and uses on the hidden states that it keeps.
  at::Tensor replicated(const at::Tensor& weight) const { return split_sequence_ ? shared(weight, size_) : weight; }

  // x [..., own] -> [..., total]: every rank's columns, by rank; rank r has min(share, what is left) with share =
  // ceil(total / size). The gradient goes back to the columns' owner, as every rank computes the same with the whole.
  at::Tensor gather_columns(const at::Tensor& x, int64_t total) const;
  // x [size * n, ...], the same on every rank, of every rank's own samples -> this rank's own [n, ...]. Backward: each
  // rank brings the gradient of its own, and all get all of them over `size`, as of a mean over the ranks.
  at::Tensor own_rows(const at::Tensor& x) const;

  // x [n, ...] of this rank's own samples -> [size * n, ...] of all ranks'. For the way back by own_rows: backward
  // takes the gradient of the ranks' mean loss, the same everywhere, and gives that of this rank's own loss.
  at::Tensor gather_rows(const at::Tensor& x) const;

  // Without a graph. [size, ...] by rank.
  at::Tensor all_gather(const at::Tensor& x) const;
  at::Tensor sum(const at::Tensor& x) const;  // a new tensor

 private:
  friend struct TensorParallelOps;
  at::Tensor gather_sequence(const at::Tensor& x, int64_t length) const;
  at::Tensor scatter_sum(const at::Tensor& x) const;

  std::shared_ptr<Group> group_;
  int rank_ = 0, size_ = 1;
  bool split_sequence_ = false;
};

}  // namespace shardsmith
