#include "optim/reducer.h"

#include <ATen/ATen.h>

namespace shardsmith {

GradientReducer::GradientReducer(std::vector<at::Tensor> parameters, double bucket_cap_mb) {
  const auto cap = static_cast<int64_t>(bucket_cap_mb * (1 << 20));
  int64_t bytes = 0;
  for (auto p = parameters.rbegin(); p != parameters.rend(); ++p) {
    if (!p->requires_grad()) continue;
    const int64_t size = static_cast<int64_t>(p->nbytes());
    const bool full = bytes > 0 && bytes + size > cap;
    if (buckets_.empty() || full || buckets_.back().front().scalar_type() != p->scalar_type()) {
      buckets_.emplace_back();
      bytes = 0;
    }
    buckets_.back().push_back(*p);
    bytes += size;
  }
}

void GradientReducer::average(Group& group) {
  const double share = 1.0 / group.size();
  const auto unpack = [&](const std::vector<at::Tensor>& bucket, Pending& pending) {
    const at::Tensor flat = pending.wait().mul_(share);
    int64_t offset = 0;
    for (const at::Tensor& parameter : bucket) {
      parameter.mutable_grad().copy_(flat.slice(0, offset, offset + parameter.numel()).view(parameter.sizes()));
      offset += parameter.numel();
    }
  };
  Pending previous;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    std::vector<at::Tensor> parts;
    for (at::Tensor& parameter : buckets_[b]) {
      if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
      parts.push_back(parameter.grad().reshape({-1}));
    }
    Pending current = group.all_reduce_sum(at::cat(parts));
    if (previous) unpack(buckets_[b - 1], previous);
    previous = std::move(current);
  }
  if (previous) unpack(buckets_.back(), previous);
}

}  // namespace shardsmith
