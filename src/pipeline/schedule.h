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

// How a stage orders its work.
//   kInterleaved: one forward, one backward (Narayanan et al., "PipeDream-Flush"): stage s of p first runs
//                 min(m, p - s - 1) forwards, then alternates, then drains. At most p - s microbatches hold
//                 activations.
//   kSimple:      all forwards, then all backwards, both ascending.
enum class ScheduleKind { kInterleaved, kSimple };
// The word of the configuration, "interleaved" or "simple". Throws kInvalidArgument for any other.
ScheduleKind schedule_kind(const std::string& word);

// How many microbatches may hold activations at once where nobody says: two more than there are stages, at most all.
int default_active_microbatches(int stages, int microbatches);

// The work of stage `stage` of `stages` in a training step. On no stage do more than `active` microbatches hold
// activations: interleaved then runs at most `active` - 1 forwards ahead, simple works through groups of `active`
// microbatches. Every limit is free of deadlocks: a stage never runs fewer forwards ahead than the one after it. Below
// `stages` it makes the pipeline's bubble longer. Throws kInvalidArgument unless 0 <= stage < stages and the counts are
// at least 1.
std::vector<Task> training_order(ScheduleKind kind, int stage, int stages, int microbatches, int active);
// The order that a stage keeps to: training_order with `active` 0 meaning default_active_microbatches(), and where
// several ranks of a stage compute logits `together`, so that these come in the order of the microbatches: the last
// stage then goes on to the next one when the function of this one has gone backward or, in evaluation, has ended. The
// stages before still run their forwards first: so few that they never wait for the last one to take them.
std::vector<Task> stage_order(ScheduleKind kind, int stage, int stages, int microbatches, int active, bool together);
// All forwards in order, for evaluation: nothing is held, so nothing is limited.
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
