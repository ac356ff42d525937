#include "optim/reducer.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardsmith {
namespace {

at::Tensor rows_of(const at::Tensor& tensor, const RowRange& range) {
  return tensor.dim() == 0 ? tensor : tensor.slice(0, range.begin, range.end);
}

// The ranges one after the other in `flat`, which may be longer. `work` gets each one and its place, shaped alike.
template <typename Parameters, typename Work>
int64_t walk(const std::vector<RowRange>& ranges, const Parameters& parameters, const at::Tensor& flat,
             const Work& work) {
  int64_t at = 0;
  for (const RowRange& range : ranges) {
    const at::Tensor rows = rows_of(parameters[range.parameter].tensor, range);
    work(range, flat.slice(0, at, at + rows.numel()).view(rows.sizes()));
    at += rows.numel();
  }
  return at;
}

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
  transfers_ = make_transfers(buckets_, sizes, static_cast<int64_t>(bucket_cap_mb * (1 << 20)));
  if (!sharded_) return;
  for (size_t b = 0; b < buckets_.size(); ++b)
    for (const RowRange& range : buckets_[b].shares[static_cast<size_t>(rank_)])
      shards_.push_back({parameters_[range.parameter].name, range.begin, range.end, b});
}

void GradientReducer::begin_step() {
  next_ = 0;
  reductions_.clear();
}

void GradientReducer::ready(int place, Group& group) {
  while (next_ < transfers_.size() && buckets_[transfers_[next_].bucket].place >= place) start(next_++, group);
}

void GradientReducer::finish(Group& group) {
  while (next_ < transfers_.size()) start(next_++, group);
  while (!reductions_.empty()) land_reduction();
}

// [ranks, part]: each rank's part, one after the other; not sharded, there is one part for all.
void GradientReducer::start(size_t t, Group& group) {
  at::NoGradGuard no_grad;
  const Transfer& transfer = transfers_[t];
  const at::Tensor& like = parameters_[buckets_[transfer.bucket].parameters.front()].tensor;
  const auto parts = static_cast<int64_t>(transfer.parts.size());
  const at::Tensor packed = at::empty({parts, transfer.part_elements}, like.options().requires_grad(false));
  for (int64_t r = 0; r < parts; ++r) {
    const at::Tensor part = packed.select(0, r);
    const int64_t used = walk(transfer.parts[static_cast<size_t>(r)], parameters_, part,
                              [&](const RowRange& range, const at::Tensor& place) {
                                const at::Tensor& gradient = parameters_[range.parameter].tensor.grad();
                                gradient.defined() ? place.copy_(rows_of(gradient, range)) : place.zero_();
                              });
    if (used < transfer.part_elements) part.slice(0, used).zero_();
  }
  if (reductions_.size() >= kTransfersUnderWay) land_reduction();
  reductions_.push_back({t, sharded_ ? group.reduce_scatter_sum(packed) : group.all_reduce_sum(packed)});
}

void GradientReducer::land_reduction() {
  at::NoGradGuard no_grad;
  Flight flight = std::move(reductions_.front());
  reductions_.pop_front();
  const at::Tensor sum = flight.pending.wait().view(-1).mul_(1.0 / ranks_);
  walk(transfers_[flight.transfer].parts[sharded_ ? static_cast<size_t>(rank_) : 0], parameters_, sum,
       [&](const RowRange& range, const at::Tensor& mean) {
         at::Tensor& parameter = parameters_[range.parameter].tensor;
         if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
         rows_of(parameter.grad(), range).copy_(mean);
       });
}

std::vector<GradientReducer::Part> GradientReducer::gradients() const {
  std::vector<Part> found;
  for (const Bucket& bucket : buckets_)
    for (const RowRange& range : bucket.shares[sharded_ ? static_cast<size_t>(rank_) : 0])
      if (const at::Tensor& gradient = parameters_[range.parameter].tensor.grad(); gradient.defined())
        found.push_back(
            {parameters_[range.parameter].name, parameters_[range.parameter].tensor, rows_of(gradient, range)});
  return found;
}

void GradientReducer::clip(double norm, double max_norm) const {
  const double scale = max_norm / (norm + 1e-6);
  if (!(scale < 1)) return;
  at::NoGradGuard no_grad;
  for (const Part& part : gradients()) at::Tensor(part.gradient).mul_(scale);
}

void GradientReducer::start_gather(size_t bucket, Group& group) {
  at::NoGradGuard no_grad;
  for (size_t t = 0; t < transfers_.size(); ++t) {
    const Transfer& transfer = transfers_[t];
    if (transfer.bucket != bucket) continue;
    const at::Tensor& like = parameters_[buckets_[bucket].parameters.front()].tensor;
    const at::Tensor part = at::empty({transfer.part_elements}, like.options().requires_grad(false));
    const int64_t used = walk(transfer.parts[static_cast<size_t>(rank_)], parameters_, part,
                              [&](const RowRange& range, const at::Tensor& place) {
                                place.copy_(rows_of(parameters_[range.parameter].tensor.detach(), range));
                              });
    if (used < transfer.part_elements) part.slice(0, used).zero_();
    if (gathers_.size() >= kTransfersUnderWay) land_gather();
    gathers_.push_back({t, group.all_gather(part)});
  }
}

void GradientReducer::land_gather() {
  at::NoGradGuard no_grad;
  Flight flight = std::move(gathers_.front());
  gathers_.pop_front();
  const at::Tensor all = flight.pending.wait();
  const Transfer& transfer = transfers_[flight.transfer];
  for (size_t r = 0; r < transfer.parts.size(); ++r)
    if (static_cast<int>(r) != rank_)
      walk(transfer.parts[r], parameters_, all[static_cast<int64_t>(r)],
           [&](const RowRange& range, const at::Tensor& theirs) {
             rows_of(parameters_[range.parameter].tensor.detach(), range).copy_(theirs);
           });
}

void GradientReducer::finish_gather() {
  while (!gathers_.empty()) land_gather();
}

}  // namespace shardsmith
