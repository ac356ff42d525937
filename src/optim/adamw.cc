#include "optim/adamw.h"

#include <ATen/ATen.h>

#include <unordered_map>

#include "base/error.h"
#include "optim/adamw_update.h"

namespace shardsmith {
namespace {

// Where there is no kernel of ours, torch's.
struct Lists {
  std::vector<at::Tensor> parameters, gradients, averages, squares, steps;
  std::vector<std::pair<at::Tensor, at::Tensor>> rounded;  // (parameter, its master)

  void add(const at::Tensor& parameter, const at::Tensor& gradient, const AdamW::State& state) {
    parameters.push_back(parameter);
    gradients.push_back(gradient);
    averages.push_back(state.exp_avg);
    squares.push_back(state.exp_avg_sq);
    steps.push_back(state.step);
  }
  void update(const AdamWGroup& group) {
    if (parameters.empty()) return;
    at::_fused_adamw_(parameters, gradients, averages, squares, {}, steps, group.lr, group.beta1, group.beta2,
                      group.weight_decay, group.epsilon, /*amsgrad=*/false, /*maximize=*/false);
    for (auto& [parameter, master] : rounded) parameter.copy_(master);
  }
};

}  // namespace

AdamW::AdamW(std::vector<AdamWGroup> groups) : groups_(std::move(groups)) {
  std::unordered_map<const void*, std::string> seen;
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (size_t i = 0; i < groups_[g].parameters.size(); ++i) {
      const std::string place = str("group ", g, " position ", i);
      const auto [first, fresh] = seen.emplace(groups_[g].parameters[i].unsafeGetTensorImpl(), place);
      if (!fresh)
        fail(ErrorKind::kInvalidArgument, "a parameter is given to the optimizer twice: in ", first->second, " and in ",
             place);
    }
    states_.emplace_back(groups_[g].parameters.size());
  }
}

void AdamW::step(double gradient_scale) {
  at::NoGradGuard no_grad;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const AdamWGroup& group = groups_[g];
    std::vector<AdamWTensors> fused;
    Lists lists;
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      const at::Tensor& parameter = group.parameters[i];
      if (!parameter.grad().defined()) continue;
      State& state = states_[g][i];
      const bool narrow = parameter.scalar_type() == at::kBFloat16 || parameter.scalar_type() == at::kHalf;
      if (!state.step.defined()) {
        state.step = at::zeros({}, parameter.options().dtype(at::kFloat));
        if (narrow) state.master = parameter.detach().to(at::kFloat);
        const at::Tensor& like = narrow ? state.master : parameter;
        state.exp_avg = at::zeros_like(like);
        state.exp_avg_sq = at::zeros_like(like);
      }
      state.step.add_(1);
      const at::Tensor master = narrow ? state.master : parameter.detach();
      const at::Tensor& gradient = parameter.grad();
      if (parameter.is_cpu() && master.scalar_type() == at::kFloat) {
        fused.push_back({gradient, master, state.exp_avg, state.exp_avg_sq, narrow ? parameter.detach() : at::Tensor(),
                         state.step.item<double>()});
      } else {
        const at::Tensor wide = gradient.to(master.scalar_type());
        lists.add(master, gradient_scale == 1 ? wide : wide.mul(gradient_scale), state);
        if (narrow) lists.rounded.emplace_back(parameter.detach(), master);
      }
    }
    adamw_update(fused, {group.lr, group.beta1, group.beta2, group.epsilon, group.weight_decay, gradient_scale});
    lists.update(group);
  }
}

void AdamW::zero_grad() {
  for (AdamWGroup& group : groups_)
    for (at::Tensor& parameter : group.parameters) parameter.mutable_grad().reset();
}

}  // namespace shardsmith
