// Averages gradients over the ranks that hold the same slice, bucket by bucket, while the backward still makes others;
// and where each of these ranks updates a share of the parameters only, brings the updated shares to all.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <string>
#include <vector>

#include "comm/group.h"
#include "optim/buckets.h"

namespace shardsmith {

// Rows [begin, end) of a parameter's dimension 0, which this rank owns.
struct Shard {
  std::string name;
  int64_t begin = 0, end = 0;
  size_t bucket = 0;
};

// One thread at a time; the ranks of the group make the same calls in the same order.
class GradientReducer {
 public:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    int place = 0;       // see FamilyTensor
    int64_t unit = 1;    // rows of dimension 0 that belong together
    bool alone = false;  // reduced by itself, at the end
  };
  GradientReducer() = default;
  // Parameters that need no gradient are passed over. `sharded`: each rank gets the average of its own shards only,
  // and what other rows of the gradients hold afterwards is undefined.
  GradientReducer(std::vector<Parameter> parameters, double bucket_cap_mb, int rank, int ranks, bool sharded);

  void begin_step();
  // Gradients at `place` and behind won't change any more in this step.
  void ready(int place, Group& group);
  // grad = sum over `group` / group size, in place, of what hasn't been reduced yet in this step; returns when all is.
  // A parameter without a gradient counts as zeros.
  void finish(Group& group);

  bool is_sharded() const { return sharded_; }
  size_t buckets() const { return buckets_.size(); }
  const std::vector<Shard>& shards() const { return shards_; }  // this rank's; none where not sharded
  // Gradients of all parameters, or of this rank's shards where it is sharded; those that there are.
  struct Part {
    std::string name;
    at::Tensor parameter, gradient;
  };
  std::vector<Part> gradients() const;
  // Scales them by max_norm / (norm + 1e-6) where that is below 1 (torch's clip_grad_norm_).
  void clip(double norm, double max_norm) const;
  // This rank's shards of a bucket have been updated.
  void start_gather(size_t bucket, Group& group);
  // All ranks' shards are everywhere.
  void finish_gather();

 private:
  struct Flight {
    size_t transfer = 0;
    Pending pending;
  };
  void start(size_t transfer, Group& group);
  void land_reduction();
  void land_gather();

  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;
  std::vector<Transfer> transfers_;
  std::vector<Shard> shards_;
  int rank_ = 0, ranks_ = 1;
  bool sharded_ = false;
  size_t next_ = 0;  // transfer to be reduced
  std::deque<Flight> reductions_, gathers_;
};

}  // namespace shardsmith
