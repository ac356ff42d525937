#include "nn/loss.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "base/error.h"
#include "nn/softmax_cpu.h"

namespace shardsmith {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Autocast is off inside custom functions' own arithmetic: we cast by hand.
at::ScalarType product_dtype(const at::Tensor& x) {
  const c10::DeviceType device = x.device().type();
  return at::autocast::is_autocast_enabled(device) ? at::autocast::get_autocast_dtype(device) : x.scalar_type();
}

// What the function needs besides tensors.
struct Call {
  LossOptions options;
  at::ScalarType product = at::kFloat;
  bool graph = false;  // somebody may ask for gradients; inside a custom function the grad mode is off
  bool is_split() const { return options.ranks && options.ranks->size() > 1; }
};

// One chunk's rows: their losses, and in place of the logits the gradient of each row's loss by its logits, times the
// row's `scale` [n]. logits [n, own], to be taken as `wide`; rows of the head that the labels [n] name count from 0 at
// this rank's first one.
at::Tensor softmax_loss(at::Tensor& logits, const at::Tensor& labels, const at::Tensor& scale, at::ScalarType wide,
                        const Call& call, bool want_gradient) {
  const bool has_kernel = cpu::has_softmax(logits);
  const at::Tensor y = labels.unsqueeze(1);
  const auto subtract_at = [&](const at::Tensor& rows, const at::Tensor& where) {
    logits.scatter_add_(1, where, rows.to(logits.scalar_type()).neg().unsqueeze(1));
  };
  if (!call.is_split() && !has_kernel) {
    at::Tensor log_p = at::log_softmax(logits, 1, wide);
    const at::Tensor losses = log_p.gather(1, y).neg_();
    if (want_gradient) {
      logits = log_p.exp_().mul_(scale.unsqueeze(1));
      subtract_at(scale, y);
    }
    return losses.squeeze(1);
  }
  // Of each rank its maximum, the sum of exponentials above it, and the label's logit where it has it: one exchange.
  const int64_t own = logits.size(1);
  at::Tensor facts = at::zeros({3, logits.size(0)}, logits.options().dtype(wide));
  const at::Tensor here = at::logical_and(y.ge(0), y.lt(own)), local = y.masked_fill(at::logical_not(here), 0);
  if (own == 0) {
    facts[0].fill_(-std::numeric_limits<double>::infinity());
  } else if (has_kernel) {
    cpu::softmax_facts(logits, labels, facts);
  } else {
    logits = logits.to(wide);
    facts[0].copy_(logits.amax(1));
    facts[2].copy_(logits.gather(1, local).masked_fill_(at::logical_not(here), 0).squeeze(1));
    logits.sub_(facts[0].unsqueeze(1)).exp_();
    facts[1].copy_(logits.sum(1));
  }
  const at::Tensor all = call.is_split() ? call.options.ranks->all_gather(facts) : facts.unsqueeze(0);  // [size, 3, n]
  const at::Tensor maxima = all.select(1, 0), maximum = maxima.amax(0);
  const at::Tensor total = (all.select(1, 1) * (maxima - maximum).exp()).sum(0);
  if (want_gradient && own > 0) {
    if (has_kernel) {
      cpu::softmax_gradient(logits, labels, maximum.contiguous(), total.contiguous(), scale);
    } else {
      logits.mul_((scale * (facts[0] - maximum).exp() / total).unsqueeze(1));
      subtract_at(scale.masked_fill(at::logical_not(here).squeeze(1), 0), local);
    }
  }
  return total.log() + maximum - all.select(1, 2).sum(0);
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  // x [N, H], weight [own, H], bias [own] or undefined, labels [N] that all count; part [N]: which mean a row is in;
  // share [N]: 1 / rows of that mean. Returns [parts].
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& given_bias, const at::Tensor& labels,
                            const at::Tensor& part, const at::Tensor& share, const Call& call) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    SpareTensor* spare = call.options.spare;
    const at::Tensor bias = given_bias.value_or(at::Tensor());
    const at::ScalarType product = call.product;
    const int64_t rows = x.size(0), chunk = std::min(call.options.chunk, rows);
    const bool want_x = call.graph && x.requires_grad(), want_weight = call.graph && weight.requires_grad();
    const bool want_bias = call.graph && bias.defined() && bias.requires_grad();
    const bool want_any = want_x || want_weight || want_bias;
    const at::ScalarType wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor xp = x.to(product), wp = weight.to(product);
    at::Tensor loss = at::zeros({call.options.parts}, x.options().dtype(wide));
    at::Tensor grad_x = want_x ? at::empty_like(xp) : at::Tensor();
    const bool direct = want_weight && spare && !is_watched(weight);
    at::Tensor grad_weight, grad_bias;
    if (want_weight)
      grad_weight =
          direct ? spare->take(weight.sizes(), weight.options()) : at::empty(weight.sizes(), weight.options());
    if (want_bias) grad_bias = at::zeros(bias.sizes(), bias.options().dtype(wide));
    const std::vector<int64_t> shape{chunk, weight.size(0)};
    SpareTensor* place = call.options.logits;
    const at::Tensor buffer = place ? place->take(shape, xp.options()) : at::empty(shape, xp.options());
    for (int64_t begin = 0; begin < rows; begin += chunk) {
      const int64_t end = std::min(rows, begin + chunk);
      const at::Tensor xc = xp.slice(0, begin, end), shares = share.slice(0, begin, end);
      const at::Tensor y = labels.slice(0, begin, end), scale = shares.mul(call.options.scale);
      at::Tensor logits = buffer.slice(0, 0, end - begin);
      at::mm_out(logits, xc, wp.t());
      if (bias.defined()) logits = logits.to(wide).add_(bias);
      const at::Tensor losses = softmax_loss(logits, y, scale, wide, call, want_any);
      loss.index_add_(0, part.slice(0, begin, end), losses.mul(shares));
      if (!want_any) continue;
      if (want_bias) grad_bias.add_(logits.sum(0));
      const at::Tensor grad = logits.to(product);
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
    if (place) place->give_back(buffer);
    context->save_for_backward(direct ? variable_list{weight} : variable_list{});
    context->saved_data["spare"] = direct ? reinterpret_cast<int64_t>(spare) : int64_t{0};
    context->saved_data["grad_x"] = want_x ? grad_x.to(x.scalar_type()) : at::Tensor();
    context->saved_data["grad_weight"] = grad_weight;
    context->saved_data["scale"] = call.options.scale;
    context->saved_data["grad_bias"] = want_bias ? grad_bias.to(bias.scalar_type()) : at::Tensor();
    return loss;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = [&](const char* name) {
      const c10::IValue& value = context->saved_data[name];
      return value.isTensor() ? value.toTensor() : at::Tensor();
    };
    // The gradients were made on the way, with the same weight for every part.
    const at::Tensor factor = grads[0].select(0, 0).div(context->saved_data["scale"].toDouble());
    if (grads[0].size(0) > 1 && !grads[0].eq(factor).all().item<bool>())
      fail(ErrorKind::kUnsupported, "the ranks of a tensor-parallel group scale their losses differently");
    // In place: a step runs backward once, and a second pass of 4 bytes x V x H is not free.
    const auto scaled = [&](at::Tensor gradient) {
      return gradient.defined() ? gradient.mul_(factor.to(gradient.scalar_type())) : gradient;
    };
    const at::Tensor grad_x = scaled(saved("grad_x")), grad_bias = scaled(saved("grad_bias"));
    at::Tensor grad_weight = saved("grad_weight");
    if (auto* spare = reinterpret_cast<SpareTensor*>(context->saved_data["spare"].toInt())) {
      at::Tensor weight = context->get_saved_variables()[0];
      if (weight.grad().defined()) {
        // On a GPU the number is not there to be read without waiting for it.
        factor.is_cpu() ? weight.mutable_grad().add_(grad_weight, factor.item())
                        : weight.mutable_grad().add_(scaled(grad_weight));
      } else {
        weight.mutable_grad() = scaled(grad_weight);
      }
      spare->give_back(grad_weight);
      grad_weight = at::Tensor();
    } else {
      grad_weight = scaled(grad_weight);
    }
    context->saved_data.clear();
    return {grad_x, grad_weight, grad_bias, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// As a custom function takes what may be missing.
std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

at::Tensor rows_loss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& y,
                     const LossOptions& options) {
  const at::Tensor x = hidden.reshape({-1, hidden.size(-1)});
  const at::Tensor labels = y.reshape({-1});
  const int64_t parts = options.parts, rows = labels.numel();
  const auto wide = hidden.options().dtype(hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor counted = labels.ne(kIgnoredLabel).nonzero().squeeze(1);
  // Where nothing counts the loss is nothing over nothing, but depends on the model all the same.
  if (counted.numel() == 0) {
    const at::Tensor nothing = (hidden.sum() * 0).to(wide.dtype()).div(0);
    return parts == 1 ? nothing : nothing.expand({parts});
  }
  const at::Tensor kept = labels.index_select(0, counted);
  const int64_t low = kept.min().item<int64_t>(), high = kept.max().item<int64_t>();
  const int64_t vocabulary = options.ranks ? options.vocab_size : weight.size(0);
  if (low < 0 || high >= vocabulary)
    fail(ErrorKind::kInvalidArgument, "labels hold ", low < 0 ? low : high, ", outside the vocabulary of ", vocabulary,
         " (", kIgnoredLabel, " means: doesn't count)");
  const at::Tensor part = at::floor_divide(counted, rows / parts);
  const at::Tensor counts = at::bincount(part, {}, parts);
  const at::Tensor share = counts.to(wide.dtype()).reciprocal().index_select(0, part);
  Call call{options, product_dtype(hidden), at::GradMode::is_enabled()};
  at::Tensor loss = LinearCrossEntropy::apply(counted.numel() == rows ? x : x.index_select(0, counted), weight,
                                              optional(bias), kept - options.first_row, part, share, call);
  if (parts == 1) return loss.select(0, 0);
  return loss + at::zeros_like(loss).div_(counts);  // NaN for a part where no label counts
}

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
                                const at::Tensor& labels, const LossOptions& options) {
  return rows_loss(hidden, weight, bias, labels.to(hidden.device()), options);
}

at::Tensor causal_lm_loss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                          const LossOptions& options) {
  const int64_t sequence = hidden.size(1);
  return rows_loss(hidden.slice(1, 0, sequence - 1), weight, {}, labels.slice(1, 1, sequence).to(hidden.device()),
                   options);
}

}  // namespace shardsmith
