#include "pipeline/schedule.h"

#include <algorithm>

#include "base/error.h"

namespace shardsmith {

std::vector<Task> one_forward_one_backward(int stage, int stages, int microbatches) {
  const int warm_up = std::min(microbatches, stages - stage - 1);
  std::vector<Task> order;
  order.reserve(2 * static_cast<size_t>(microbatches));
  for (int i = 0; i < warm_up; ++i) order.push_back({Task::Kind::kForward, i});
  for (int i = warm_up; i < microbatches; ++i) {
    order.push_back({Task::Kind::kForward, i});
    order.push_back({Task::Kind::kBackward, i - warm_up});
  }
  for (int i = microbatches - warm_up; i < microbatches; ++i) order.push_back({Task::Kind::kBackward, i});
  return order;
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
