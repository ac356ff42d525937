#include "optim/reducer.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardsmith {
namespace {

// Buckets that may be under way: each is a copy of its gradients.
constexpr size_t kUnderWay = 3;

}  // namespace

GradientReducer::GradientReducer(std::vector<Parameter> parameters, double bucket_cap_mb, int rank, int ranks,
                                 bool sharded)
    : parameters_(std::move(parameters)), rank_(rank), ranks_(ranks), sharded_(sharded && ranks > 1) {
  std::erase_if(parameters_, [](const Parameter& p) { return !p.tensor.requires_grad(); });
  std::vector<BucketParameter> sizes;
  for (const Parameter& p : parameters_) {
    const int64_t count = p.tensor.dim() == 0 ? 1 : p.tensor.size(0);
    sizes.push_back({count, count ? p.tensor.numel() / count : 0, static_cast<int64_t>(p.tensor.element_size()), p.unit,
                     p.place, static_cast<int>(p.tensor.scalar_type()), p.alone});
  }
  buckets_ = make_buckets(sizes, static_cast<int64_t>(bucket_cap_mb * (1 << 20)), sharded_ ? ranks : 1);
  if (!sharded_) return;
  for (size_t b = 0; b < buckets_.size(); ++b)
    for (const RowRange& range : buckets_[b].shares[static_cast<size_t>(rank_)])
      shards_.push_back({parameters_[range.parameter].name, range.begin, range.end, b});
}

at::Tensor GradientReducer::rows(const at::Tensor& tensor, const RowRange& range) const {
  return tensor.dim() == 0 ? tensor : tensor.slice(0, range.begin, range.end);
}

void GradientReducer::begin_step() {
  next_ = 0;
  reductions_.clear();
}

void GradientReducer::ready(int place, Group& group) {
  while (next_ < buckets_.size() && buckets_[next_].place >= place) start(next_++, group);
}

void GradientReducer::finish(Group& group) {
  while (next_ < buckets_.size()) start(next_++, group);
  while (!reductions_.empty()) land_reduction();
}

// [ranks, share]: each rank's share of the bucket, one after the other; not sharded, there is one share for all.
void GradientReducer::start(size_t b, Group& group) {
  at::NoGradGuard no_grad;
  const Bucket& bucket = buckets_[b];
  const at::Tensor& like = parameters_[bucket.parameters.front()].tensor;
  const auto shares = static_cast<int64_t>(bucket.shares.size());
  at::Tensor packed = at::empty({shares, bucket.share_elements}, like.options().requires_grad(false));
  for (int64_t r = 0; r < shares; ++r) {
    const at::Tensor share = packed.select(0, r);
    int64_t at = 0;
    for (const RowRange& range : bucket.shares[static_cast<size_t>(r)]) {
      const at::Tensor& gradient = parameters_[range.parameter].tensor.grad();
      const at::Tensor& parameter = parameters_[range.parameter].tensor;
      const int64_t count = rows(parameter, range).numel();
      const at::Tensor place = share.slice(0, at, at + count);
      if (gradient.defined())
        place.view(rows(parameter, range).sizes()).copy_(rows(gradient, range));
      else
        place.zero_();
      at += count;
    }
    if (at < bucket.share_elements) share.slice(0, at).zero_();
  }
  if (reductions_.size() >= kUnderWay) land_reduction();
  reductions_.push_back({b, sharded_ ? group.reduce_scatter_sum(packed) : group.all_reduce_sum(packed)});
}

void GradientReducer::land_reduction() {
  at::NoGradGuard no_grad;
  Flight flight = std::move(reductions_.front());
  reductions_.pop_front();
  const at::Tensor sum = flight.pending.wait().view(-1).mul_(1.0 / ranks_);
  const Bucket& bucket = buckets_[flight.bucket];
  int64_t at = 0;
  for (const RowRange& range : bucket.shares[sharded_ ? static_cast<size_t>(rank_) : 0]) {
    at::Tensor& parameter = parameters_[range.parameter].tensor;
    if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
    const at::Tensor own = rows(parameter.grad(), range);
    own.copy_(sum.slice(0, at, at + own.numel()).view(own.sizes()));
    at += own.numel();
  }
}

std::vector<GradientReducer::Part> GradientReducer::gradients() const {
  std::vector<Part> found;
  for (const Bucket& bucket : buckets_)
    for (const RowRange& range : bucket.shares[sharded_ ? static_cast<size_t>(rank_) : 0])
      if (const at::Tensor& gradient = parameters_[range.parameter].tensor.grad(); gradient.defined())
        found.push_back(
            {parameters_[range.parameter].name, parameters_[range.parameter].tensor, rows(gradient, range)});
  return found;
}

void GradientReducer::start_gather(size_t b, Group& group) {
  at::NoGradGuard no_grad;
  const Bucket& bucket = buckets_.at(b);
  const at::Tensor& like = parameters_[bucket.parameters.front()].tensor;
  const at::Tensor share = at::empty({bucket.share_elements}, like.options().requires_grad(false));
  int64_t at = 0;
  for (const RowRange& range : bucket.shares[static_cast<size_t>(rank_)]) {
    const at::Tensor own = rows(parameters_[range.parameter].tensor.detach(), range);
    share.slice(0, at, at + own.numel()).view(own.sizes()).copy_(own);
    at += own.numel();
  }
  if (at < bucket.share_elements) share.slice(0, at).zero_();
  if (gathers_.size() >= kUnderWay) land_gather();
  gathers_.push_back({b, group.all_gather(share)});
}

void GradientReducer::land_gather() {
  at::NoGradGuard no_grad;
  Flight flight = std::move(gathers_.front());
  gathers_.pop_front();
  const at::Tensor all = flight.pending.wait();
  const Bucket& bucket = buckets_[flight.bucket];
  for (size_t r = 0; r < bucket.shares.size(); ++r) {
    if (static_cast<int>(r) == rank_) continue;
    int64_t at = 0;
    for (const RowRange& range : bucket.shares[r]) {
      const at::Tensor theirs = rows(parameters_[range.parameter].tensor.detach(), range);
      theirs.copy_(all[static_cast<int64_t>(r)].slice(0, at, at + theirs.numel()).view(theirs.sizes()));
      at += theirs.numel();
    }
  }
}

void GradientReducer::finish_gather() {
  while (!gathers_.empty()) land_gather();
}

}  // namespace shardsmith
