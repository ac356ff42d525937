#include "pipeline/tied_embedding.h"

#include <ATen/ATen.h>

namespace shardsmith {

TiedEmbedding::TiedEmbedding(at::Tensor weight, Group* pipeline, int stage, int last)
    : weight_(std::move(weight)), pipeline_(pipeline), is_first_(stage == 0), last_(last) {}

at::Tensor& TiedEmbedding::gradient() {
  if (!weight_.grad().defined()) weight_.mutable_grad() = at::zeros_like(weight_);
  return weight_.mutable_grad();
}

void TiedEmbedding::sync(int tag) {
  if (!weight_.defined()) return;
  const at::Tensor data = weight_.detach();
  is_first_ ? pipeline_->send(data, last_, tag).wait() : pipeline_->receive(data, 0, tag).wait();
}

void TiedEmbedding::begin_step() {
  if (!trains() || !summed_) return;
  before_ = weight_.grad();
  weight_.mutable_grad() = at::Tensor();
  summed_ = false;
  looked_up_.clear();
}

void TiedEmbedding::look_up(const at::Tensor& rows) {
  if (trains() && is_first_) looked_up_.push_back(rows);
}

void TiedEmbedding::before_last_backward(const Tags& tags) {
  if (!trains() || !is_first_ || head_gradient_) return;
  at::NoGradGuard no_grad;
  head_gradient_ = pipeline_->receive(at::empty_like(weight_), last_, tags.head);
}

Pending TiedEmbedding::after_last_backward(const Tags& tags) {
  if (!trains() || is_first_ || head_sent_) return {};
  at::NoGradGuard no_grad;
  head_sent_ = true;
  return pipeline_->send(gradient(), 0, tags.head);
}

at::Tensor TiedEmbedding::sum_on_first(const Tags& tags) {
  before_last_backward(tags);  // where no microbatch went backward
  const at::Tensor sum = head_gradient_.wait();
  const auto numbers = weight_.options().dtype(at::kLong).requires_grad(false);
  at::Tensor rows = at::empty({0}, numbers);
  if (!looked_up_.empty()) rows = std::get<0>(at::_unique(at::cat(looked_up_).to(weight_.device())));
  const at::Tensor values = gradient().index_select(0, rows);
  Pending sent[] = {pipeline_->send(at::full({1}, rows.numel(), numbers), last_, tags.rows),
                    pipeline_->send(rows, last_, tags.rows), pipeline_->send(values, last_, tags.rows)};
  sum.index_add_(0, rows, values);
  for (Pending& pending : sent) pending.wait();
  return sum;
}

at::Tensor TiedEmbedding::sum_on_last(const Tags& tags, const std::function<void()>& wait_for_sends) {
  if (Pending pending = after_last_backward(tags)) pending.wait();
  wait_for_sends();  // it is about to change
  head_sent_ = false;
  const auto plain = weight_.options().requires_grad(false);
  const auto receive = [&](std::vector<int64_t> shape, at::ScalarType dtype) {
    return pipeline_->receive(at::empty(shape, plain.dtype(dtype)), 0, tags.rows).wait();
  };
  const int64_t count = receive({1}, at::kLong).item<int64_t>();
  const at::Tensor rows = receive({count}, at::kLong);
  const at::Tensor values = receive({count, weight_.size(1)}, weight_.scalar_type());
  return gradient().index_add_(0, rows, values);
}

void TiedEmbedding::sum(const Tags& tags, const std::function<void()>& wait_for_sends) {
  if (!trains()) return;
  at::Tensor sum = is_first_ ? sum_on_first(tags) : sum_on_last(tags, wait_for_sends);
  if (before_.defined()) sum = before_.add_(sum);
  weight_.mutable_grad() = sum;
  before_ = at::Tensor();
  summed_ = true;
  looked_up_.clear();
}

void TiedEmbedding::leave() {
  if (!trains() || summed_ || weight_.grad().defined()) return;
  weight_.mutable_grad() = std::move(before_);
  before_ = at::Tensor();
  summed_ = true;
}

}  // namespace shardsmith
