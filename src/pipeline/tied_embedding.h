// A tied embedding's gradient, which is made on two stages: rows that were looked up on the first one, the head's on
// the last one.
//
// The head's is dense, and is sent as soon as its last backward is done, while the first stage still computes; the
// first stage's has the rows that were looked up, and only those travel back. Both then add the same rows to the same
// head's gradient: the same bits on both.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "comm/group.h"

namespace shardsmith {

// Used by one thread at a time. The tags are those of one step.
class TiedEmbedding {
 public:
  struct Tags {
    int head = 0, rows = 0;
  };
  TiedEmbedding() = default;  // none: nothing is done
  // `pipeline` must outlive it; stage `last` of it is the other end of stage 0.
  TiedEmbedding(at::Tensor weight, Group* pipeline, int stage, int last);

  bool is(const at::Tensor& tensor) const { return weight_.defined() && tensor.is_same(weight_); }
  // Parameters of the first stage to the last.
  void sync(int tag);
  // Of a training step. Goes on from a step that wasn't summed.
  void begin_step();
  // First stage: rows that a forward looks up, [n] int64.
  void look_up(const at::Tensor& rows);
  // The step's last backward: the first stage before it runs, the last one after it.
  void before_last_backward(const Tags& tags);
  Pending after_last_backward(const Tags& tags);
  // `wait_for_sends` waits for what after_last_backward sent. With a step that isn't summed: leave().
  void sum(const Tags& tags, const std::function<void()>& wait_for_sends);
  // What this step made stays as it is; one that made nothing leaves the earlier steps' sum in place.
  void leave();

 private:
  bool trains() const { return weight_.defined() && weight_.requires_grad(); }
  at::Tensor& gradient();
  at::Tensor sum_on_first(const Tags& tags);
  at::Tensor sum_on_last(const Tags& tags, const std::function<void()>& wait_for_sends);

  at::Tensor weight_;
  Group* pipeline_ = nullptr;
  bool is_first_ = false;
  int last_ = 0;
  at::Tensor before_;                  // the gradient of earlier steps, which is summed already
  bool summed_ = true;                 // all is summed, or there is nothing
  bool head_sent_ = false;             // last stage: its gradient is on its way
  Pending head_gradient_;              // first stage: the same, coming
  std::vector<at::Tensor> looked_up_;  // first stage: rows since the last sum
};

}  // namespace shardsmith
