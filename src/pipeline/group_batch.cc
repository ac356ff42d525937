#include "pipeline/group_batch.h"

#include <ATen/ATen.h>

#include "base/error.h"

namespace shardsmith {
namespace {

enum Fact : int64_t { kRows, kSequence, kLabels, kPositions, kTypes, kMask, kContent, kFacts };

// A number that differs where the content does, but for one chance in 2^64.
int64_t content_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  const at::Tensor flat = tensor.reshape({-1}).to(at::kLong);
  const at::Tensor place = at::arange(1, flat.numel() + 1, flat.options()).mul_(0x9e3779b97f4a7c15);
  return at::bitwise_xor(flat.mul(0x2545f4914f6cdd1d), place).mul_(place).sum().item<int64_t>();
}

at::Tensor facts_of(const Inputs& own, bool own_batch) {
  at::Tensor facts = at::zeros({kFacts}, at::kLong);
  int64_t* f = facts.data_ptr<int64_t>();
  f[kRows] = own.input_ids.size(0);
  f[kSequence] = own.input_ids.size(1);
  f[kLabels] = own.labels.defined();
  f[kPositions] = own.position_ids.defined();
  f[kTypes] = own.token_type_ids.defined();
  f[kMask] = own.attention_mask.defined();
  if (!own_batch)
    f[kContent] = content_of(own.input_ids) + 3 * content_of(own.labels) + 5 * content_of(own.attention_mask);
  return facts.to(own.input_ids.device());
}

void check(const int64_t* first, const int64_t* other, int rank, bool own_batch) {
  const auto shape = [](const int64_t* f) { return str("[", f[kRows], ", ", f[kSequence], "]"); };
  if (shape(first) != shape(other))
    fail(ErrorKind::kInvalidArgument,
         "the ranks of a tensor-parallel group must bring batches of one shape: tp rank 0 has ", shape(first),
         ", tp rank ", rank, " has ", shape(other));
  for (const auto& [fact, name] :
       {std::pair(kLabels, "labels"), std::pair(kPositions, "position_ids"), std::pair(kTypes, "token_type_ids")}) {
    if (first[fact] != other[fact])
      fail(ErrorKind::kInvalidArgument, "of a tensor-parallel group tp rank ", first[fact] ? 0 : rank, " brings ", name,
           ", tp rank ", first[fact] ? rank : 0, " doesn't");
  }
  if (!own_batch && first[kContent] != other[kContent])
    fail(ErrorKind::kInvalidArgument,
         "prescaled_batch is on, so the ranks of a tensor-parallel group must bring the same "
         "batch, but tp rank ",
         rank, "'s is not tp rank 0's: deal the data out by rdp_rank(), or turn it off");
}

}  // namespace

Inputs group_batch(const Inputs& own, const TensorParallel& ranks, bool own_batch) {
  if (ranks.size() == 1) return own;
  at::NoGradGuard no_grad;
  const at::Tensor all = ranks.all_gather(facts_of(own, own_batch)).cpu();
  bool any_mask = false;
  for (int r = 0; r < ranks.size(); ++r) {
    const int64_t* facts = all.data_ptr<int64_t>() + r * kFacts;
    check(all.data_ptr<int64_t>(), facts, r, own_batch);
    any_mask = any_mask || facts[kMask];
  }
  if (!own_batch) return own;
  const auto gathered = [&](const at::Tensor& tensor) {
    return tensor.defined() ? ranks.all_gather(tensor.contiguous()).flatten(0, 1) : tensor;
  };
  Inputs group{
      gathered(own.input_ids), {}, gathered(own.position_ids), gathered(own.labels), gathered(own.token_type_ids)};
  if (any_mask) {
    const at::Tensor mask =
        own.attention_mask.defined() ? own.attention_mask.to(at::kLong) : at::ones_like(own.input_ids);
    group.attention_mask = gathered(mask);
  }
  return group;
}

}  // namespace shardsmith
