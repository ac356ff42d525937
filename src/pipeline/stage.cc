#include "pipeline/stage.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "base/error.h"
#include "optim/gradient_norm.h"
#include "pipeline/group_batch.h"

namespace shardsmith {
namespace {

// Before anything is built on it.
const FamilyModel& checked(const FamilyModel& model, const StageOptions& options) {
  require_sound(options.partition, static_cast<int>(model.description.num_layers));
  if (options.stage < 0 || options.stage >= options.partition.stages())
    fail(ErrorKind::kInvalidArgument, "there is no pipeline stage ", options.stage, " of ", options.partition.stages());
  return model;
}

at::TensorOptions activation_options(const Parameters& parameters) {
  return parameters.held().front().second.options().requires_grad(false);
}

std::vector<Task> order_of(const Stage::Step& step, const StageOptions& options, bool together) {
  const int stages = options.partition.stages();
  const bool in_turn = together && options.stage == stages - 1;
  if (!step.training && !in_turn) return all_forward(step.microbatches);
  return stage_order(options.schedule, options.stage, stages, step.microbatches, options.active_microbatches, together);
}

// A turn that wakes the others with an error if its work throws.
class Turn {
 public:
  Turn(Turns& turns, Task task) : turns_(turns) { turns_.enter(task); }
  template <typename F>
  void run(const F& work) {
    try {
      work();
    } catch (const std::exception& e) {
      turns_.abort(e.what());
      throw;
    }
    turns_.leave();
  }

 private:
  Turns& turns_;
};

}  // namespace

Stage::Stage(const FamilyModel& model, const Parameters& parameters, StageOptions options)
    : model_(checked(model, options)),
      parameters_(parameters),
      options_(std::move(options)),
      ranks_(options_.tensor, options_.split_sequence),
      compute_(model, options_.partition, options_.stage, parameters, ranks_, !options_.prescaled_batch,
               options_.switches) {
  if (stages() > 1 && !options_.pipeline)
    fail(ErrorKind::kInvalidArgument, "stage ", options_.stage, " of ", stages(), " needs a pipeline group");
  if (options_.pipeline && options_.pipeline->size() != stages())
    fail(ErrorKind::kInvalidArgument, "the partition has ", stages(), " stages, the pipeline group ",
         options_.pipeline->size(), " ranks");
  if (stages() > 1 && model.description.tied_head && (is_first() || is_last()))
    tied_ = TiedEmbedding(parameters_.get("word_embedding.weight"), &*options_.pipeline, options_.stage, stages() - 1);
  reducer_ = make_reducer();
  if (has_replicas())
    compute_.on_gradients([this](int place) {
      if (last_backward_) reducer_.ready(place, *options_.replicas);
    });
}

at::TensorOptions Stage::boundary() const {
  const at::TensorOptions options = activation_options(parameters_);
  const bool is_wide = options_.switches.fp32_residual_addition && options.dtype() != at::kDouble;
  return is_wide ? options.dtype(at::kFloat) : options;
}

GradientReducer Stage::make_reducer() const {
  std::unordered_map<std::string, const FamilyTensor*> tensors;
  for (const FamilyTensor& tensor : model_.tensors) tensors.emplace(tensor.hf_name, &tensor);
  std::vector<GradientReducer::Parameter> parameters;
  for (const auto& [name, parameter] : parameters_.held()) {
    const FamilyTensor& tensor = *tensors.at(name);
    // A tied embedding is the same on two stages, so its sums must be made alike on both.
    parameters.push_back({name, parameter, tensor.place, tensor.row_unit(), tied_.is(parameter)});
  }
  const int rank = has_replicas() ? options_.replicas->rank() : 0,
            ranks = has_replicas() ? options_.replicas->size() : 1;
  return GradientReducer(std::move(parameters), options_.bucket_cap_mb, rank, ranks, options_.shard_optimizer_state);
}

int Stage::tag(Edge edge, int microbatch) const {
  const uint64_t task = step_.number * static_cast<uint64_t>(step_.microbatches) + static_cast<uint64_t>(microbatch);
  return static_cast<int>((task * static_cast<uint64_t>(Edge::kCount) + static_cast<uint64_t>(edge)) & 0x3fffffff);
}

void Stage::begin_step(const Step& step) {
  step_ = step;
  microbatches_.assign(static_cast<size_t>(step.microbatches), {});
  incoming_.clear();
  incoming_.resize(static_cast<size_t>(step.microbatches));
  outgoing_.clear();
  backwards_ = 0;
  reducer_.begin_step();
  if (step.training) tied_.begin_step();
  turns_.begin(order_of(step, options_, ranks_.size() > 1));
}

void Stage::post_forward_receive(int microbatch, const Inputs& like) {
  Pending& pending = incoming_[static_cast<size_t>(microbatch)];
  if (pending) return;
  const at::Tensor buffer = at::empty(compute_.hidden_shape(like), boundary());
  pending = options_.pipeline->receive(buffer, options_.stage - 1, tag(Edge::kForward, microbatch));
}

void Stage::hold(Pending pending) {
  outgoing_.push_back(std::move(pending));
  // What was sent long ago has been received, as the neighbour answered since; this only lets go of its memory.
  if (outgoing_.size() > 2 * static_cast<size_t>(stages() + 1)) {
    outgoing_.front().wait();
    outgoing_.erase(outgoing_.begin());
  }
}

void Stage::wait_for_sends() {
  for (Pending& pending : outgoing_) pending.wait();
  outgoing_.clear();
}

at::Tensor Stage::forward(int microbatch, const Inputs& inputs) {
  Pending loss = start_forward(microbatch, inputs);
  return loss ? loss.wait() : microbatches_[static_cast<size_t>(microbatch)].loss;
}

DropoutContext Stage::dropout_of(int microbatch, int64_t own_rows) const {
  const auto rows = static_cast<uint64_t>(own_rows);
  const bool own_batch = ranks_.size() > 1 && !options_.prescaled_batch;
  return {step_.dropout,        options_.seed,
          step_.number,         step_.first_sample + static_cast<uint64_t>(microbatch) * rows,
          own_batch ? rows : 0, step_.rank_samples};
}

Pending Stage::start_forward(int microbatch, const Inputs& own) {
  Microbatch& m = microbatches_.at(static_cast<size_t>(microbatch));
  Pending remote_loss;
  Turn(turns_, {Task::Kind::kForward, microbatch}).run([&] {
    at::AutoGradMode grad_mode(step_.training);
    const Inputs inputs = group_batch(own, ranks_, !options_.prescaled_batch);
    m.inputs = inputs;
    if (step_.training) tied_.look_up(compute_.looked_up(inputs));
    if (!is_first()) {
      post_forward_receive(microbatch, inputs);
      m.input = incoming_[static_cast<size_t>(microbatch)].wait();
      if (microbatch + 1 < step_.microbatches) post_forward_receive(microbatch + 1, inputs);
      m.input.requires_grad_(step_.training);
    }
    m.dropout = dropout_of(microbatch, own.input_ids.size(0));
    m.output = compute_.forward(m.input, inputs, m.dropout);
    if (!is_last()) {
      // Autocast may have narrowed an output; the boundary has the parameters' dtype on both sides.
      const at::Tensor sent = m.output.detach().to(boundary().dtype()).contiguous();
      hold(options_.pipeline->send(sent, options_.stage + 1, tag(Edge::kForward, microbatch)));
      if (inputs.labels.defined()) {
        const auto wide = sent.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
        remote_loss = options_.pipeline->receive(at::empty({}, sent.options().dtype(wide)), stages() - 1,
                                                 tag(Edge::kLoss, microbatch));
      }
    } else if (inputs.labels.defined()) {
      m.loss = compute_.loss(m.output, inputs, m.dropout, step_.loss_scale);
      for (int s = 0; s + 1 < stages(); ++s)
        hold(options_.pipeline->send(m.loss.detach().clone(), s, tag(Edge::kLoss, microbatch)));
    }
  });
  return remote_loss;
}

const Stage::Microbatch& Stage::computed(int microbatch) const {
  const Microbatch& m = microbatches_.at(static_cast<size_t>(microbatch));
  if (!is_last() || !m.output.defined())
    fail(ErrorKind::kInvalidArgument, "logits are on the last stage, after its forward: this is stage ", options_.stage,
         " of ", stages());
  return m;
}

at::Tensor Stage::output(int microbatch) {
  const Microbatch& m = computed(microbatch);
  return compute_.output(m.output, m.inputs, m.dropout);
}

at::Tensor Stage::pooled(int microbatch) {
  const Microbatch& m = computed(microbatch);
  if (!compute_.has_pooler()) fail(ErrorKind::kInvalidArgument, "this model has no pooler");
  return compute_.pooled(m.output, m.inputs);
}

void Stage::backward(int microbatch, const at::Tensor& loss, double scale) {
  Microbatch& m = microbatches_.at(static_cast<size_t>(microbatch));
  Turn(turns_, {Task::Kind::kBackward, microbatch}).run([&] {
    const bool last_backward = ++backwards_ == step_.microbatches;
    last_backward_ = last_backward && step_.reduce;
    if (is_last()) {
      if (!loss.defined() || !loss.requires_grad())
        fail(ErrorKind::kInvalidArgument, "model.backward(loss): the loss does not depend on the model's output");
      torch::autograd::backward({loss}, {at::full_like(loss, scale * step_.loss_scale)});
    } else {
      Pending gradient = options_.pipeline->receive(at::empty(m.output.sizes(), boundary()), options_.stage + 1,
                                                    tag(Edge::kBackward, microbatch));
      if (last_backward && step_.reduce) tied_.before_last_backward(tied_tags());  // after the other, as they are sent
      torch::autograd::backward({m.output}, {gradient.wait().to(m.output.scalar_type())});
    }
    last_backward_ = false;
    if (!is_first())
      hold(options_.pipeline->send(m.input.grad().contiguous(), options_.stage - 1, tag(Edge::kBackward, microbatch)));
    if (last_backward && step_.reduce)
      if (Pending sent = tied_.after_last_backward(tied_tags())) hold(std::move(sent));
    // Where a function reads the logits after its backward, they are there as values.
    Microbatch kept;
    if (is_last()) kept.output = m.output.detach(), kept.inputs = m.inputs, kept.dropout = m.dropout;
    m = kept;
  });
}

void Stage::finish_microbatch(int microbatch) { turns_.finish(microbatch); }

void Stage::abort(const std::string& text) { turns_.abort(text); }

void Stage::finish_step(bool reduce) {
  turns_.require_done();
  wait_for_sends();
  microbatches_.clear();
  if (!reduce) return tied_.leave();
  at::NoGradGuard no_grad;
  tied_.sum(tied_tags(), [this] { wait_for_sends(); });
  if (has_replicas()) reducer_.finish(*options_.replicas);
}

std::vector<at::Tensor> Stage::run_step(const Step& step, const std::vector<Inputs>& microbatches) {
  begin_step(step);
  std::vector<at::Tensor> losses(microbatches.size());
  std::vector<Pending> remote(microbatches.size());
  for (const Task& task : order_of(step, options_, ranks_.size() > 1)) {
    const auto i = static_cast<size_t>(task.microbatch);
    if (task.kind == Task::Kind::kForward) {
      remote[i] = start_forward(task.microbatch, microbatches.at(i));
      if (!remote[i]) losses[i] = microbatches_[i].loss;
    } else if (step.training) {
      backward(task.microbatch, losses[i], 1.0 / step.microbatches);
    } else {
      finish_microbatch(task.microbatch);
    }
  }
  for (size_t i = 0; i < remote.size(); ++i)
    if (remote[i]) losses[i] = remote[i].wait();
  for (at::Tensor& loss : losses)
    if (loss.defined()) loss = loss.detach();
  finish_step(step.training);
  return losses;
}

std::vector<at::Tensor> Stage::broadcast(std::vector<at::Tensor> tensors, int root) {
  if (stages() == 1) return tensors;
  Group& group = *options_.pipeline;
  const int first_tag = static_cast<int>(0x40000000 + (broadcasts_++ * 1024) % 0x3f000000);
  // The shapes travel first: [count, then for each tensor: dtype, rank, extents].
  constexpr int64_t kHeader = 256;
  at::Tensor header = at::zeros({kHeader}, at::kLong);
  int64_t* h = header.data_ptr<int64_t>();
  if (options_.stage == root) {
    int64_t used = 0;
    h[used++] = static_cast<int64_t>(tensors.size());
    for (at::Tensor& tensor : tensors) {
      tensor = tensor.detach().contiguous();
      if (used + 2 + tensor.dim() > kHeader)
        fail(ErrorKind::kUnsupported, "more tensors in a step's arguments or results (", tensors.size(),
             ") than can be sent between stages");
      h[used++] = static_cast<int64_t>(tensor.scalar_type());
      h[used++] = tensor.dim();
      for (const int64_t extent : tensor.sizes()) h[used++] = extent;
    }
    std::vector<Pending> sends;
    for (int s = 0; s < stages(); ++s) {
      if (s == root) continue;
      sends.push_back(group.send(header, s, first_tag));
      for (size_t i = 0; i < tensors.size(); ++i)
        if (tensors[i].numel() > 0) sends.push_back(group.send(tensors[i], s, first_tag + 1 + static_cast<int>(i)));
    }
    for (Pending& pending : sends) pending.wait();
    return tensors;
  }
  group.receive(header, root, first_tag).wait();
  std::vector<at::Tensor> received;
  int64_t used = 1;
  for (int64_t i = 0; i < h[0]; ++i) {
    const auto dtype = static_cast<at::ScalarType>(h[used]);
    const std::vector<int64_t> shape(h + used + 2, h + used + 2 + h[used + 1]);
    used += 2 + h[used + 1];
    at::Tensor tensor = at::empty(shape, at::TensorOptions().dtype(dtype));
    if (tensor.numel() > 0) group.receive(tensor, root, first_tag + 1 + static_cast<int>(i)).wait();
    received.push_back(tensor);
  }
  return received;
}

void Stage::sync_parameters() {
  at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : parameters_.held()) {
    const int copies = parameters_.copies(name);
    if (copies > 1)
      tensor.detach().copy_(ranks_.all_gather(tensor.detach()).select(0, ranks_.rank() / copies * copies));
  }
  tied_.sync(tag(Edge::kTied, 0));
  if (options_.replicas && options_.replicas->size() > 1)
    for (const auto& [name, tensor] : parameters_.held()) options_.replicas->broadcast(tensor.detach(), 0).wait();
}

void Stage::start_gather(size_t bucket) {
  if (reducer_.is_sharded()) reducer_.start_gather(bucket, *options_.replicas);
}

void Stage::gather_shards() {
  for (size_t bucket = 0; bucket < buckets(); ++bucket) start_gather(bucket);
  finish_gather();
}

std::vector<at::Tensor> Stage::counted_gradients() const {
  std::vector<at::Tensor> gradients;
  for (const GradientReducer::Part& part : reducer_.gradients()) {
    const bool is_copy = !is_first() && tied_.is(part.parameter);
    if (!is_copy && ranks_.rank() % parameters_.copies(part.name) == 0) gradients.push_back(part.gradient);
  }
  return gradients;
}

double Stage::grad_norm(double type) {
  at::NoGradGuard no_grad;
  const GradientNorm norm(type);
  double total = norm.partial(counted_gradients());
  const at::Device device = activation_options(parameters_).device();
  total = norm.combine(total, options_.pipeline, device);
  total = norm.combine(total, options_.tensor, device);
  if (reducer_.is_sharded()) total = norm.combine(total, options_.replicas, device);
  return norm.finish(total);
}

double Stage::clip_grad_norm(double max_norm, double type) {
  const double norm = grad_norm(type);
  reducer_.clip(norm, max_norm);
  return norm;
}

}  // namespace shardsmith
