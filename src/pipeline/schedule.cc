#include "pipeline/schedule.h"

#include <algorithm>

#include "base/error.h"

namespace shardsmith {

namespace {

// Forwards of the first `warm_up` microbatches, then forwards and backwards in turn, then the backwards that are left.
void one_forward_one_backward(int warm_up, int microbatches, std::vector<Task>& order) {
  for (int i = 0; i < warm_up; ++i) order.push_back({Task::Kind::kForward, i});
  for (int i = warm_up; i < microbatches; ++i) {
    order.push_back({Task::Kind::kForward, i});
    order.push_back({Task::Kind::kBackward, i - warm_up});
  }
  for (int i = microbatches - warm_up; i < microbatches; ++i) order.push_back({Task::Kind::kBackward, i});
}

}  // namespace

ScheduleKind schedule_kind(const std::string& word) {
  if (word == "interleaved") return ScheduleKind::kInterleaved;
  if (word == "simple") return ScheduleKind::kSimple;
  fail(ErrorKind::kInvalidArgument, "pipeline must be interleaved or simple, not '", word, "'");
}

int default_active_microbatches(int stages, int microbatches) { return std::min(stages + 2, microbatches); }

std::vector<Task> training_order(ScheduleKind kind, int stage, int stages, int microbatches, int active) {
  if (stage < 0 || stage >= stages)
    fail(ErrorKind::kInvalidArgument, "there is no pipeline stage ", stage, " of ", stages);
  if (microbatches < 1 || active < 1)
    fail(ErrorKind::kInvalidArgument, microbatches, " microbatches, ", active,
         " of them active: both must be at least 1");
  std::vector<Task> order;
  order.reserve(2 * static_cast<size_t>(microbatches));
  if (kind == ScheduleKind::kInterleaved) {
    one_forward_one_backward(std::min({microbatches, stages - stage - 1, active - 1}), microbatches, order);
    return order;
  }
  for (int begin = 0; begin < microbatches; begin += std::min(active, microbatches)) {
    const int end = begin + std::min(active, microbatches - begin);
    for (int i = begin; i < end; ++i) order.push_back({Task::Kind::kForward, i});
    for (int i = begin; i < end; ++i) order.push_back({Task::Kind::kBackward, i});
  }
  return order;
}

std::vector<Task> stage_order(ScheduleKind kind, int stage, int stages, int microbatches, int active, bool together) {
  const int most = default_active_microbatches(stages, microbatches);
  if (active == 0) active = most;
  if (together) active = std::min(active, most);
  if (together && stage == stages - 1) kind = ScheduleKind::kInterleaved;
  return training_order(kind, stage, stages, microbatches, active);
}

std::vector<Task> all_forward(int microbatches) {
  std::vector<Task> order;
  for (int i = 0; i < microbatches; ++i) order.push_back({Task::Kind::kForward, i});
  return order;
}

void Turns::begin(std::vector<Task> order) {
  std::lock_guard lock(mutex_);
  order_ = std::move(order);
  int microbatches = 0;
  for (const Task& task : order_) microbatches = std::max(microbatches, task.microbatch + 1);
  finished_.assign(static_cast<size_t>(microbatches), false);
  next_ = 0;
  aborted_ = false;
  abort_text_.clear();
}

void Turns::pass_over_finished() {
  while (next_ < order_.size() && finished_[static_cast<size_t>(order_[next_].microbatch)]) ++next_;
}

void Turns::enter(Task task) {
  std::unique_lock lock(mutex_);
  const auto left = [&] {
    return std::find(order_.begin() + static_cast<std::ptrdiff_t>(next_), order_.end(), task) != order_.end();
  };
  if (!aborted_ && !left()) {
    fail(ErrorKind::kInvalidArgument, task.kind == Task::Kind::kForward ? "model(...)" : "model.backward(...)",
         " is called a second time, or where the step does not expect it, in microbatch ", task.microbatch,
         ": a step function calls each at most once, backward only while training");
  }
  changed_.wait(lock, [&] { return aborted_ || (next_ < order_.size() && order_[next_] == task); });
  if (aborted_) fail(ErrorKind::kPeer, abort_text_);
}

void Turns::leave() {
  std::lock_guard lock(mutex_);
  if (next_ < order_.size()) ++next_;
  pass_over_finished();
  changed_.notify_all();
}

void Turns::finish(int microbatch) {
  std::lock_guard lock(mutex_);
  if (static_cast<size_t>(microbatch) < finished_.size()) finished_[static_cast<size_t>(microbatch)] = true;
  pass_over_finished();
  changed_.notify_all();
}

void Turns::abort(const std::string& text) {
  std::lock_guard lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  abort_text_ = text;
  changed_.notify_all();
}

bool Turns::aborted() const {
  std::lock_guard lock(mutex_);
  return aborted_;
}

void Turns::require_done() const {
  std::lock_guard lock(mutex_);
  if (aborted_) fail(ErrorKind::kPeer, abort_text_);
  if (next_ != order_.size())
    fail(ErrorKind::kInvalidArgument, "the step ended before microbatch ", order_[next_].microbatch, " was finished");
}

}  // namespace shardsmith
