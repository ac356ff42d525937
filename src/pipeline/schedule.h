// The order of a pipeline stage's work, and taking turns in it. No torch: plain threads.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

namespace shardsmith {

struct Task {
  enum class Kind { kForward, kBackward };
  Kind kind;
  int microbatch;
  bool operator==(const Task&) const = default;
};

// One forward, one backward (Narayanan et al., "PipeDream-Flush"): stage s of p first runs min(m, p - s - 1) forwards,
// then alternates, then drains. At most p - s microbatches hold activations.
std::vector<Task> one_forward_one_backward(int stage, int stages, int microbatches);
// All forwards in order, for evaluation.
std::vector<Task> all_forward(int microbatches);

// Lets threads, one a microbatch, run their tasks one at a time in the order of a schedule.
// All functions may be called from any thread.
class Turns {
 public:
  // Forgets the last step.
  void begin(std::vector<Task> order);
  // Blocks until `task` is next. Throws Error(kPeer) with abort()'s text if that was called, and
  // Error(kInvalidArgument) if the schedule has no such task left.
  void enter(Task task);
  // Ends the task entered.
  void leave();
  // The microbatch's function returned: tasks of it that have not run are passed over.
  void finish(int microbatch);
  void abort(const std::string& text);
  bool aborted() const;
  // Throws unless all tasks have run or were passed over.
  void require_done() const;

 private:
  void pass_over_finished();  // holds mutex_

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Task> order_;
  std::vector<bool> finished_;
  size_t next_ = 0;
  bool aborted_ = false;
  std::string abort_text_;
};

}  // namespace shardsmith
