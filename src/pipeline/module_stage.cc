#include "pipeline/module_stage.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "base/error.h"
#include "optim/gradient_norm.h"

namespace shardsmith {
namespace {

int size_of(const std::optional<Group>& group) { return group ? group->size() : 1; }
int rank_of(const std::optional<Group>& group) { return group ? group->rank() : 0; }

}  // namespace

ModuleStage::ModuleStage(const FamilyModel& model, const Parameters& parameters, std::vector<at::Tensor> buffers,
                         ModuleStageOptions options)
    : model_(model), parameters_(parameters), buffers_(std::move(buffers)), options_(std::move(options)) {
  std::vector<GradientReducer::Parameter> all, own;
  // The last parameters' gradients are made first.
  for (auto held = parameters_.held().rbegin(); held != parameters_.held().rend(); ++held) {
    all.push_back({held->first, held->second, 0, 1, false});
    // What a split layer holds whole has the same gradient on all tp ranks, so their mean changes nothing.
    if (!options_.prescaled_batch && !is_split(held->first)) own.push_back(all.back());
  }
  const double cap = options_.bucket_cap_mb;
  reducer_ = GradientReducer(std::move(all), cap, rank_of(options_.replicas), size_of(options_.replicas),
                             options_.shard_optimizer_state);
  own_batch_ = GradientReducer(std::move(own), cap, rank_of(options_.tensor), size_of(options_.tensor), false);
}

void ModuleStage::begin_step(double loss_scale) {
  loss_scale_ = loss_scale;
  reducer_.begin_step();
  own_batch_.begin_step();
}

void ModuleStage::backward(const std::vector<at::Tensor>& losses, const std::vector<at::Tensor>& gradients,
                           double scale) {
  std::vector<at::Tensor> given;
  for (size_t i = 0; i < losses.size(); ++i) {
    if (!losses[i].defined() || !losses[i].requires_grad())
      fail(ErrorKind::kInvalidArgument, "model.backward(loss): the loss does not depend on the model's output");
    const bool has_gradient = i < gradients.size() && gradients[i].defined();
    if (!has_gradient && losses[i].numel() != 1)
      fail(ErrorKind::kInvalidArgument, "model.backward takes a scalar loss, or grad_tensors of the losses' shapes");
    if (has_gradient && gradients[i].sizes() != losses[i].sizes())
      fail(ErrorKind::kInvalidArgument, "model.backward: grad_tensors[", i, "] is not of its tensor's shape");
    given.push_back(has_gradient ? gradients[i] * (scale * loss_scale_)
                                 : at::full_like(losses[i], scale * loss_scale_));
  }
  torch::autograd::backward(losses, given);
}

void ModuleStage::finish_step(bool reduce) {
  if (!reduce) return;
  at::NoGradGuard no_grad;
  if (size_of(options_.tensor) > 1) own_batch_.finish(*options_.tensor);
  if (size_of(options_.replicas) > 1) reducer_.finish(*options_.replicas);
}

void ModuleStage::broadcast(std::optional<Group>& group, const at::Tensor& tensor) {
  if (size_of(group) == 1 || tensor.numel() == 0) return;
  if (tensor.is_contiguous() && tensor.scalar_type() != at::kBool) {
    group->broadcast(tensor.detach(), 0).wait();
    return;
  }
  const bool is_bool = tensor.scalar_type() == at::kBool;
  const at::Tensor copy = is_bool ? tensor.detach().to(at::kByte) : tensor.detach().contiguous();
  tensor.detach().copy_(group->broadcast(copy, 0).wait());
}

void ModuleStage::sync_parameters() {
  at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : parameters_.held()) {
    if (!is_split(name)) broadcast(options_.tensor, tensor);
    broadcast(options_.replicas, tensor);
  }
  sync_buffers();
}

void ModuleStage::sync_buffers() {
  at::NoGradGuard no_grad;
  for (const at::Tensor& buffer : buffers_) {
    broadcast(options_.tensor, buffer);
    broadcast(options_.replicas, buffer);
  }
}

void ModuleStage::start_gather(size_t bucket) {
  if (reducer_.is_sharded()) reducer_.start_gather(bucket, *options_.replicas);
}

void ModuleStage::gather_shards() {
  for (size_t bucket = 0; bucket < buckets(); ++bucket) start_gather(bucket);
  finish_gather();
}

double ModuleStage::grad_norm(double type) {
  at::NoGradGuard no_grad;
  const GradientNorm norm(type);
  std::vector<at::Tensor> gradients;
  for (const GradientReducer::Part& part : reducer_.gradients())
    if (is_split(part.name) || rank_of(options_.tensor) == 0) gradients.push_back(part.gradient);
  double total = norm.partial(gradients);
  const at::Device device = parameters_.held().front().second.device();
  total = norm.combine(total, options_.tensor, device);
  if (reducer_.is_sharded()) total = norm.combine(total, options_.replicas, device);
  return norm.finish(total);
}

double ModuleStage::clip_grad_norm(double max_norm, double type) {
  const double norm = grad_norm(type);
  reducer_.clip(norm, max_norm);
  return norm;
}

}  // namespace shardsmith
