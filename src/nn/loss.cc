#include "nn/loss.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "base/error.h"

namespace shardsmith {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Autocast is off inside custom functions' own arithmetic: we cast by hand.
at::ScalarType product_dtype(const at::Tensor& x) {
  const c10::DeviceType device = x.device().type();
  return at::autocast::is_autocast_enabled(device) ? at::autocast::get_autocast_dtype(device) : x.scalar_type();
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  // x [N, H], weight [V, H], labels [N], all counted. `graph`: somebody may ask for gradients (inside a custom function
  // the grad mode is off, so that the caller has to say).
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& labels, int64_t chunk, at::ScalarType product, bool graph,
                            SpareTensor* spare) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const int64_t rows = x.size(0);
    const bool want_x = graph && x.requires_grad(), want_weight = graph && weight.requires_grad();
    const at::ScalarType wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor xp = x.to(product), wp = weight.to(product);
    at::Tensor loss = at::zeros({}, x.options().dtype(wide));
    at::Tensor grad_x = want_x ? at::empty_like(xp) : at::Tensor();
    const bool direct = want_weight && spare && !is_watched(weight);
    at::Tensor grad_weight;
    if (want_weight) grad_weight = direct ? spare->take(weight) : at::empty(weight.sizes(), weight.options());
    for (int64_t begin = 0; begin < rows; begin += chunk) {
      const int64_t end = std::min(rows, begin + chunk);
      const at::Tensor xc = xp.slice(0, begin, end), yc = labels.slice(0, begin, end).unsqueeze(1);
      at::Tensor log_p = at::log_softmax(at::mm(xc, wp.t()), 1, wide);
      loss.sub_(log_p.gather(1, yc).sum());
      if (!want_x && !want_weight) continue;
      at::Tensor grad = log_p.exp_();
      grad.scatter_add_(1, yc, at::full({1, 1}, -1.0, grad.options()).expand(yc.sizes()));
      grad = grad.mul_(1.0 / static_cast<double>(rows)).to(product);
      if (want_x) grad_x.slice(0, begin, end).copy_(at::mm(grad, wp));
      if (want_weight) {
        if (product != weight.scalar_type())
          begin == 0 ? grad_weight.copy_(at::mm(grad.t(), xc)) : grad_weight.add_(at::mm(grad.t(), xc));
        else if (begin == 0)
          at::mm_out(grad_weight, grad.t(), xc);
        else
          grad_weight.addmm_(grad.t(), xc);
      }
    }
    context->save_for_backward(direct ? variable_list{weight} : variable_list{});
    context->saved_data["spare"] = direct ? reinterpret_cast<int64_t>(spare) : int64_t{0};
    context->saved_data["grad_x"] = want_x ? grad_x.to(x.scalar_type()) : at::Tensor();
    context->saved_data["grad_weight"] = grad_weight;
    return loss.div_(static_cast<double>(rows));
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = [&](const char* name) {
      const c10::IValue& value = context->saved_data[name];
      return value.isTensor() ? value.toTensor() : at::Tensor();
    };
    // In place: a step runs backward once, and a second pass of 4 bytes x V x H is not free.
    const auto scaled = [&](at::Tensor gradient) {
      return gradient.defined() ? gradient.mul_(grads[0].to(gradient.scalar_type())) : gradient;
    };
    const at::Tensor grad_x = scaled(saved("grad_x"));
    at::Tensor grad_weight = saved("grad_weight");
    if (auto* spare = reinterpret_cast<SpareTensor*>(context->saved_data["spare"].toInt())) {
      at::Tensor weight = context->get_saved_variables()[0];
      if (weight.grad().defined()) {
        // On a GPU the number is not there to be read without waiting for it.
        grads[0].is_cpu() ? weight.mutable_grad().add_(grad_weight, grads[0].item())
                          : weight.mutable_grad().add_(scaled(grad_weight));
        spare->give_back(grad_weight);
      } else {
        weight.mutable_grad() = scaled(grad_weight);
      }
      grad_weight = at::Tensor();
    } else {
      grad_weight = scaled(grad_weight);
    }
    context->saved_data.clear();
    return {grad_x, grad_weight, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor causal_lm_loss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels, int64_t chunk,
                          SpareTensor* spare) {
  const int64_t sequence = hidden.size(1);
  const at::Tensor x = hidden.slice(1, 0, sequence - 1).reshape({-1, hidden.size(2)});
  const at::Tensor y = labels.slice(1, 1, sequence).reshape({-1}).to(hidden.device());
  const at::Tensor counted = y.ne(kIgnoredLabel).nonzero().squeeze(1);
  if (counted.numel() == 0) return (hidden.sum() * 0).div(0);
  const at::Tensor kept = y.index_select(0, counted);
  const int64_t low = kept.min().item<int64_t>(), high = kept.max().item<int64_t>();
  if (low < 0 || high >= weight.size(0))
    fail(ErrorKind::kInvalidArgument, "labels hold ", low < 0 ? low : high, ", outside the vocabulary of ",
         weight.size(0), " (", kIgnoredLabel, " means: doesn't count)");
  const at::Tensor rows = counted.numel() == y.numel() ? x : x.index_select(0, counted);
  return LinearCrossEntropy::apply(rows, weight, kept, chunk, product_dtype(hidden), at::GradMode::is_enabled(), spare);
}

}  // namespace shardsmith
