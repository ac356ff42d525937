#include "pipeline/stage.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace shardsmith {
namespace {

std::vector<at::Tensor> tensors_of(const Parameters& parameters) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : parameters.held()) tensors.push_back(tensor);
  return tensors;
}

at::TensorOptions activation_options(const Parameters& parameters) {
  return parameters.held().front().second.options().requires_grad(false);
}

at::Tensor gradient_or_zeros(at::Tensor& parameter) {
  if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
  return parameter.grad();
}

std::vector<Task> order_of(const Stage::Step& step, int stage, int stages) {
  return step.training ? one_forward_one_backward(stage, stages, step.microbatches) : all_forward(step.microbatches);
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
    : model_(model),
      parameters_(parameters),
      options_(std::move(options)),
      compute_(model, options_.partition, options_.stage, parameters),
      reducer_(tensors_of(parameters), options_.bucket_cap_mb) {
  if (stages() > 1 && !options_.pipeline)
    fail(ErrorKind::kInvalidArgument, "stage ", options_.stage, " of ", stages(), " needs a pipeline group");
  if (options_.pipeline && options_.pipeline->size() != stages())
    fail(ErrorKind::kInvalidArgument, "the partition has ", stages(), " stages, the pipeline group ",
         options_.pipeline->size(), " ranks");
  if (stages() > 1 && model.description.tied_head && (is_first() || is_last()))
    tied_ = parameters_.get("word_embedding.weight");
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
  if (step.training) begin_tied();
  turns_.begin(order_of(step, options_.stage, stages()));
}

void Stage::begin_tied() {
  backwards_ = 0;
  if (!tied_.defined() || !tied_.requires_grad() || !tied_summed_) return;  // else it goes on from an unreduced step
  tied_before_ = tied_.grad();
  tied_.mutable_grad() = at::Tensor();
  tied_summed_ = false;
  looked_up_.clear();
}

void Stage::send_head_gradient() {
  if (!tied_.defined() || !tied_.requires_grad() || head_sent_) return;
  at::NoGradGuard no_grad;
  hold(options_.pipeline->send(gradient_or_zeros(tied_), 0, tag(Edge::kTied, 0)));
  head_sent_ = true;
}

void Stage::post_head_gradient() {
  if (!tied_.defined() || !tied_.requires_grad() || head_gradient_) return;
  at::NoGradGuard no_grad;
  head_gradient_ = options_.pipeline->receive(at::empty_like(tied_), stages() - 1, tag(Edge::kTied, 0));
}

// A step that isn't reduced: what it made stays as it is; one that made nothing leaves the earlier steps' sum in place.
void Stage::leave_tied() {
  if (!tied_.defined() || !tied_.requires_grad() || tied_summed_ || tied_.grad().defined()) return;
  tied_.mutable_grad() = std::move(tied_before_);
  tied_before_ = at::Tensor();
  tied_summed_ = true;
}

void Stage::sum_tied() {
  if (!tied_.defined() || !tied_.requires_grad()) return;
  Group& group = *options_.pipeline;
  const auto numbers = tied_.options().dtype(at::kLong).requires_grad(false);
  at::Tensor sum;
  if (is_first()) {
    post_head_gradient();
    sum = head_gradient_.wait();
    const at::Tensor ids = std::get<0>(at::_unique(at::cat(looked_up_).to(tied_.device())));
    const at::Tensor rows = gradient_or_zeros(tied_).index_select(0, ids);
    const at::Tensor count = at::full({1}, ids.numel(), numbers);
    Pending sent[] = {group.send(count, stages() - 1, tag(Edge::kTiedRows, 0)),
                      group.send(ids, stages() - 1, tag(Edge::kTiedRows, 0)),
                      group.send(rows, stages() - 1, tag(Edge::kTiedRows, 0))};
    sum.index_add_(0, ids, rows);
    for (Pending& pending : sent) pending.wait();
  } else {
    send_head_gradient();
    for (Pending& pending : outgoing_) pending.wait();  // it is about to change
    outgoing_.clear();
    head_sent_ = false;
    sum = gradient_or_zeros(tied_);
    const int64_t count = group.receive(at::empty({1}, numbers), 0, tag(Edge::kTiedRows, 0)).wait().item<int64_t>();
    const at::Tensor ids = group.receive(at::empty({count}, numbers), 0, tag(Edge::kTiedRows, 0)).wait();
    const at::Tensor rows =
        group.receive(at::empty({count, tied_.size(1)}, activation_options(parameters_)), 0, tag(Edge::kTiedRows, 0))
            .wait();
    sum.index_add_(0, ids, rows);
  }
  if (tied_before_.defined()) sum = tied_before_.add_(sum);
  tied_.mutable_grad() = sum;
  tied_before_ = at::Tensor();
  tied_summed_ = true;
}

void Stage::post_forward_receive(int microbatch, const Inputs& like) {
  Pending& pending = incoming_[static_cast<size_t>(microbatch)];
  if (pending) return;
  const at::Tensor buffer = at::empty({like.input_ids.size(0), like.input_ids.size(1), model_.description.hidden_size},
                                      activation_options(parameters_));
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

at::Tensor Stage::forward(int microbatch, const Inputs& inputs) {
  Pending loss = start_forward(microbatch, inputs);
  return loss ? loss.wait() : microbatches_[static_cast<size_t>(microbatch)].loss;
}

Pending Stage::start_forward(int microbatch, const Inputs& inputs) {
  Microbatch& m = microbatches_.at(static_cast<size_t>(microbatch));
  Pending remote_loss;
  Turn(turns_, {Task::Kind::kForward, microbatch}).run([&] {
    at::AutoGradMode grad_mode(step_.training);
    m.inputs = inputs;
    if (is_first() && tied_.defined() && step_.training) looked_up_.push_back(inputs.input_ids.reshape({-1}));
    if (!is_first()) {
      post_forward_receive(microbatch, inputs);
      m.input = incoming_[static_cast<size_t>(microbatch)].wait();
      if (microbatch + 1 < step_.microbatches) post_forward_receive(microbatch + 1, inputs);
      m.input.requires_grad_(step_.training);
    }
    DropoutContext dropout{step_.dropout, options_.seed, step_.number,
                           step_.first_sample + static_cast<uint64_t>(microbatch * inputs.input_ids.size(0))};
    m.output = compute_.forward(m.input, inputs, dropout);
    if (!is_last()) {
      // Autocast may have narrowed an output; the boundary has the parameters' dtype on both sides.
      const at::Tensor sent = m.output.detach().to(activation_options(parameters_).dtype()).contiguous();
      hold(options_.pipeline->send(sent, options_.stage + 1, tag(Edge::kForward, microbatch)));
      if (inputs.labels.defined()) {
        const auto wide = sent.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
        remote_loss = options_.pipeline->receive(at::empty({}, sent.options().dtype(wide)), stages() - 1,
                                                 tag(Edge::kLoss, microbatch));
      }
    } else if (inputs.labels.defined()) {
      m.loss = compute_.loss(m.output, inputs.labels);
      for (int s = 0; s + 1 < stages(); ++s)
        hold(options_.pipeline->send(m.loss.detach().clone(), s, tag(Edge::kLoss, microbatch)));
    }
  });
  return remote_loss;
}

at::Tensor Stage::logits(int microbatch) {
  const Microbatch& m = microbatches_.at(static_cast<size_t>(microbatch));
  if (!is_last() || !m.output.defined())
    fail(ErrorKind::kInvalidArgument, "logits are on the last stage, after its forward: this is stage ", options_.stage,
         " of ", stages());
  return compute_.logits(m.output);
}

void Stage::backward(int microbatch, const at::Tensor& loss, double scale) {
  Microbatch& m = microbatches_.at(static_cast<size_t>(microbatch));
  Turn(turns_, {Task::Kind::kBackward, microbatch}).run([&] {
    const bool last_backward = ++backwards_ == step_.microbatches;
    if (is_last()) {
      if (!loss.defined() || !loss.requires_grad())
        fail(ErrorKind::kInvalidArgument, "model.backward(loss): the loss does not depend on the model's output");
      torch::autograd::backward({loss}, {at::full_like(loss, scale)});
    } else {
      Pending gradient = options_.pipeline->receive(at::empty(m.output.sizes(), activation_options(parameters_)),
                                                    options_.stage + 1, tag(Edge::kBackward, microbatch));
      if (last_backward && is_first() && step_.reduce)
        post_head_gradient();  // after the other, as they are sent in this order
      torch::autograd::backward({m.output}, {gradient.wait().to(m.output.scalar_type())});
    }
    if (!is_first())
      hold(options_.pipeline->send(m.input.grad().contiguous(), options_.stage - 1, tag(Edge::kBackward, microbatch)));
    if (last_backward && is_last() && !is_first() && step_.reduce) send_head_gradient();
    // Where a function reads the logits after its backward, they are there as values.
    const at::Tensor kept = is_last() ? m.output.detach() : at::Tensor();
    m = {};
    m.output = kept;
  });
}

void Stage::finish_microbatch(int microbatch) { turns_.finish(microbatch); }

void Stage::abort(const std::string& text) { turns_.abort(text); }

void Stage::finish_step(bool reduce) {
  turns_.require_done();
  for (Pending& pending : outgoing_) pending.wait();
  outgoing_.clear();
  microbatches_.clear();
  if (!reduce) return leave_tied();
  at::NoGradGuard no_grad;
  sum_tied();
  if (options_.replicas && options_.replicas->size() > 1) reducer_.average(*options_.replicas);
}

std::vector<at::Tensor> Stage::run_step(const Step& step, const std::vector<Inputs>& microbatches) {
  begin_step(step);
  std::vector<at::Tensor> losses(microbatches.size());
  std::vector<Pending> remote(microbatches.size());
  for (const Task& task : order_of(step, options_.stage, stages())) {
    const auto i = static_cast<size_t>(task.microbatch);
    if (task.kind == Task::Kind::kForward) {
      remote[i] = start_forward(task.microbatch, microbatches.at(i));
      if (!remote[i]) losses[i] = microbatches_[i].loss;
    } else {
      backward(task.microbatch, losses[i], 1.0 / step.microbatches);
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
  if (tied_.defined()) {
    at::Tensor data = tied_.detach();
    if (is_first())
      options_.pipeline->send(data, stages() - 1, tag(Edge::kTied, 0)).wait();
    else
      options_.pipeline->receive(data, 0, tag(Edge::kTied, 0)).wait();
  }
  if (options_.replicas && options_.replicas->size() > 1)
    for (const auto& [name, tensor] : parameters_.held()) options_.replicas->broadcast(tensor.detach(), 0).wait();
}

double Stage::grad_norm() {
  at::NoGradGuard no_grad;
  double sum = 0;
  for (const auto& [name, tensor] : parameters_.held()) {
    const bool counted_elsewhere = tied_.defined() && !is_first() && tensor.is_same(tied_);
    if (!tensor.grad().defined() || counted_elsewhere) continue;
    const double norm = at::linalg_vector_norm(tensor.grad(), 2).item<double>();
    sum += norm * norm;
  }
  if (stages() > 1) {
    const at::Tensor total = at::full({1}, sum, activation_options(parameters_).dtype(at::kDouble));
    sum = options_.pipeline->all_reduce_sum(total).wait().item<double>();
  }
  return std::sqrt(sum);
}

double Stage::clip_grad_norm(double max_norm) {
  const double norm = grad_norm();
  const double scale = max_norm / (norm + 1e-6);
  at::NoGradGuard no_grad;
  if (scale < 1)
    for (const auto& [name, tensor] : parameters_.held())
      if (tensor.grad().defined()) tensor.grad().mul_(scale);
  return norm;
}

}  // namespace shardsmith
