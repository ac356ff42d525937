#include "optim/adamw.h"

#include <ATen/ATen.h>

#include <unordered_map>

#include "base/error.h"

namespace shardsmith {

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

void AdamW::step() {
  at::NoGradGuard no_grad;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const AdamWGroup& group = groups_[g];
    std::vector<at::Tensor> parameters, gradients, averages, squares, steps;
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      const at::Tensor& parameter = group.parameters[i];
      if (!parameter.grad().defined()) continue;
      State& state = states_[g][i];
      if (!state.step.defined()) {
        state.step = at::zeros({}, parameter.options().dtype(at::kFloat));
        state.exp_avg = at::zeros_like(parameter);
        state.exp_avg_sq = at::zeros_like(parameter);
      }
      state.step.add_(1);
      parameters.push_back(parameter);
      gradients.push_back(parameter.grad());
      averages.push_back(state.exp_avg);
      squares.push_back(state.exp_avg_sq);
      steps.push_back(state.step);
    }
    if (parameters.empty()) continue;
    at::_fused_adamw_(parameters, gradients, averages, squares, {}, steps, group.lr, group.beta1, group.beta2,
                      group.weight_decay, group.epsilon, /*amsgrad=*/false, /*maximize=*/false);
  }
}

void AdamW::zero_grad() {
  for (AdamWGroup& group : groups_)
    for (at::Tensor& parameter : group.parameters) parameter.mutable_grad().reset();
}

}  // namespace shardsmith
