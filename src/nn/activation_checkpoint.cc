#include "nn/activation_checkpoint.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

namespace shardsmith {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Compute = std::function<at::Tensor(const at::Tensor&)>;

// Autocast as one forward saw it.
struct Autocast {
  explicit Autocast(c10::DeviceType of)
      : device(of), enabled(at::autocast::is_autocast_enabled(of)), dtype(at::autocast::get_autocast_dtype(of)) {}
  void set() const {
    at::autocast::set_autocast_enabled(device, enabled);
    at::autocast::set_autocast_dtype(device, dtype);
  }
  c10::DeviceType device;
  bool enabled;
  at::ScalarType dtype;
};

// Its cache of narrowed weights is off inside: one that is filled without a graph would later be found where a graph is
// wanted.
class AutocastGuard {
 public:
  explicit AutocastGuard(const Autocast& wanted)
      : before_(wanted.device), cache_(at::autocast::is_autocast_cache_enabled()) {
    wanted.set();
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~AutocastGuard() {
    before_.set();
    at::autocast::set_autocast_cache_enabled(cache_);
  }
  AutocastGuard(const AutocastGuard&) = delete;

 private:
  const Autocast before_;
  const bool cache_;
};

struct Call : torch::CustomClassHolder {
  Call(Compute function, c10::DeviceType device) : compute(std::move(function)), autocast(device) {}
  const Compute compute;
  const Autocast autocast;
};

struct Checkpointed : torch::autograd::Function<Checkpointed> {
  // `anchor` has a gradient wherever a parameter has one: x alone wouldn't ask for a backward where it is an input.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& /*anchor*/,
                            const c10::intrusive_ptr<Call>& call) {
    context->save_for_backward({x});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    const AutocastGuard guard(call->autocast);
    return call->compute(x);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto call = c10::static_intrusive_pointer_cast<Call>(context->saved_data["call"].toCapsule());
    context->saved_data.clear();
    const at::Tensor saved = context->get_saved_variables()[0];
    const at::Tensor x = saved.detach().requires_grad_(saved.requires_grad());
    {
      at::AutoGradMode with_graph(true);
      at::Tensor y;
      {
        const AutocastGuard guard(call->autocast);
        y = call->compute(x);
      }
      if (y.requires_grad()) torch::autograd::backward({y}, {grads[0]});
    }
    return {x.grad(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor checkpointed(const at::Tensor& x, Compute compute, bool trainable) {
  if (!at::GradMode::is_enabled() || !(trainable || x.requires_grad())) return compute(x);
  const at::Tensor anchor = at::empty({0}, x.options().requires_grad(false)).requires_grad_(trainable);
  return Checkpointed::apply(x, anchor, c10::make_intrusive<Call>(std::move(compute), x.device().type()));
}

}  // namespace shardsmith
