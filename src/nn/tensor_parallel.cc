#include "nn/tensor_parallel.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

namespace shardsmith {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

int64_t pack(const TensorParallel* ranks) { return reinterpret_cast<int64_t>(ranks); }
const TensorParallel& unpack(AutogradContext* context) {
  return *reinterpret_cast<const TensorParallel*>(context->saved_data["ranks"].toInt());
}
int64_t number(AutogradContext* context, const char* name) { return context->saved_data[name].toInt(); }

int64_t share_of(int64_t length, int size) { return (length + size - 1) / size; }

// Zeros up to `length` along a dimension.
at::Tensor padded(const at::Tensor& x, int64_t dim, int64_t length) {
  if (x.size(dim) == length) return x;
  std::vector<int64_t> shape = x.sizes().vec();
  shape[static_cast<size_t>(dim)] = length - x.size(dim);
  return at::cat({x, at::zeros(shape, x.options())}, dim);
}

}  // namespace

// The functions of autograd, which may look behind TensorParallel's door.
struct TensorParallelOps {
  static at::Tensor gather_sequence(const TensorParallel& ranks, const at::Tensor& x, int64_t length) {
    return ranks.gather_sequence(x, length);
  }
  static at::Tensor scatter_sum(const TensorParallel& ranks, const at::Tensor& x) { return ranks.scatter_sum(x); }
};

namespace {

struct Enter : Function<Enter> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t length, int64_t ranks) {
    context->saved_data["ranks"] = ranks;
    const TensorParallel& group = unpack(context);
    return group.splits_sequence() ? TensorParallelOps::gather_sequence(group, x, length) : x.view_as(x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const TensorParallel& group = unpack(context);
    return {group.splits_sequence() ? TensorParallelOps::scatter_sum(group, grads[0]) : group.sum(grads[0]),
            at::Tensor(), at::Tensor()};
  }
};

struct Leave : Function<Leave> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t ranks) {
    context->saved_data["ranks"] = ranks;
    context->saved_data["length"] = x.size(1);
    const TensorParallel& group = unpack(context);
    return group.splits_sequence() ? TensorParallelOps::scatter_sum(group, x) : group.sum(x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const TensorParallel& group = unpack(context);
    return {group.splits_sequence() ? TensorParallelOps::gather_sequence(group, grads[0], number(context, "length"))
                                    : grads[0],
            at::Tensor()};
  }
};

struct Gather : Function<Gather> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t length, int64_t ranks) {
    context->saved_data["ranks"] = ranks;
    return TensorParallelOps::gather_sequence(unpack(context), x, length);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const TensorParallel::Positions own = unpack(context).positions(grads[0].size(1));
    return {grads[0].slice(1, own.begin, own.begin + own.count).contiguous(), at::Tensor(), at::Tensor()};
  }
};

struct Shared : Function<Shared> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, int64_t copies, int64_t ranks) {
    context->saved_data["ranks"] = ranks;
    context->saved_data["copies"] = copies;
    return weight.view_as(weight);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const TensorParallel& group = unpack(context);
    const int64_t copies = number(context, "copies"), different = group.size() / copies;
    if (different == 1) return {group.sum(grads[0]), at::Tensor(), at::Tensor()};
    // Each set of ranks has a place of its own in one sum over all: there are few heads to share, and one group less.
    std::vector<int64_t> shape = grads[0].sizes().vec();
    shape.insert(shape.begin(), different);
    at::Tensor all = at::zeros(shape, grads[0].options());
    all.select(0, group.rank() / copies).copy_(grads[0]);
    return {group.sum(all).select(0, group.rank() / copies).clone(), at::Tensor(), at::Tensor()};
  }
};

struct GatherColumns : Function<GatherColumns> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t total, int64_t ranks) {
    context->saved_data["ranks"] = ranks;
    context->saved_data["own"] = x.size(-1);
    const TensorParallel& group = unpack(context);
    const int64_t share = share_of(total, group.size());
    const at::Tensor all = group.all_gather(padded(x, x.dim() - 1, share));
    return at::cat(all.unbind(0), -1).slice(-1, 0, total);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const TensorParallel& group = unpack(context);
    const int64_t begin = std::min(share_of(grads[0].size(-1), group.size()) * group.rank(), grads[0].size(-1));
    return {grads[0].slice(-1, begin, begin + number(context, "own")).contiguous(), at::Tensor(), at::Tensor()};
  }
};

struct OwnRows : Function<OwnRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t ranks) {
    context->saved_data["ranks"] = ranks;
    const TensorParallel& group = unpack(context);
    const int64_t own = x.size(0) / group.size();
    return x.slice(0, own * group.rank(), own * (group.rank() + 1)).clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const TensorParallel& group = unpack(context);
    return {group.all_gather(grads[0]).flatten(0, 1).div_(group.size()), at::Tensor()};
  }
};

struct GatherRows : Function<GatherRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t ranks) {
    context->saved_data["ranks"] = ranks;
    return unpack(context).all_gather(x.contiguous()).flatten(0, 1);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const TensorParallel& group = unpack(context);
    const int64_t own = grads[0].size(0) / group.size();
    return {grads[0].slice(0, own * group.rank(), own * (group.rank() + 1)).mul(group.size()), at::Tensor()};
  }
};

}  // namespace

TensorParallel::TensorParallel(const std::optional<Group>& group, bool split_sequence) {
  if (!group || group->size() == 1) return;
  group_ = std::make_shared<Group>(*group);
  rank_ = group->rank();
  size_ = group->size();
  split_sequence_ = split_sequence;
}

TensorParallel::Positions TensorParallel::positions(int64_t length) const {
  if (!split_sequence_) return {0, length};
  const int64_t share = share_of(length, size_), begin = std::min(share * rank_, length);
  return {begin, std::min(share, length - begin)};
}

at::Tensor TensorParallel::gather_sequence(const at::Tensor& x, int64_t length) const {
  const at::Tensor all = all_gather(padded(x, 1, share_of(length, size_)));  // [size, B, share, H]
  return at::cat(all.unbind(0), 1).slice(1, 0, length).contiguous();
}

at::Tensor TensorParallel::scatter_sum(const at::Tensor& x) const {
  const int64_t length = x.size(1), share = share_of(length, size_);
  std::vector<int64_t> shape = x.sizes().vec();
  shape[1] = size_;
  shape.insert(shape.begin() + 2, share);
  const at::Tensor parts = padded(x, 1, share * size_).view(shape).transpose(0, 1).contiguous();  // [size, B, share, H]
  return group_->reduce_scatter_sum(parts).wait().slice(1, 0, positions(length).count).contiguous();
}

at::Tensor TensorParallel::all_gather(const at::Tensor& x) const {
  return size_ == 1 ? x.unsqueeze(0) : group_->all_gather(x).wait();
}

at::Tensor TensorParallel::sum(const at::Tensor& x) const {
  const at::Tensor copy = at::empty(x.sizes(), x.options()).copy_(x);  // dense, and not what others may hold
  return size_ == 1 ? copy : group_->all_reduce_sum(copy).wait();
}

at::Tensor TensorParallel::enter(const at::Tensor& x, int64_t length) const {
  return size_ == 1 ? x : Enter::apply(x, length, pack(this));
}

at::Tensor TensorParallel::leave(const at::Tensor& x) const { return size_ == 1 ? x : Leave::apply(x, pack(this)); }

at::Tensor TensorParallel::gather(const at::Tensor& x, int64_t length) const {
  return split_sequence_ ? Gather::apply(x, length, pack(this)) : x;
}

at::Tensor TensorParallel::shared(const at::Tensor& weight, int copies) const {
  return size_ == 1 || copies == 1 || !weight.defined() ? weight : Shared::apply(weight, copies, pack(this));
}

at::Tensor TensorParallel::gather_columns(const at::Tensor& x, int64_t total) const {
  return size_ == 1 ? x : GatherColumns::apply(x, total, pack(this));
}

at::Tensor TensorParallel::own_rows(const at::Tensor& x) const {
  return size_ == 1 ? x : OwnRows::apply(x, pack(this));
}

at::Tensor TensorParallel::gather_rows(const at::Tensor& x) const {
  return size_ == 1 ? x : GatherRows::apply(x, pack(this));
}

}  // namespace shardsmith
