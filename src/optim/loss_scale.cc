#include "optim/loss_scale.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace shardsmith {
namespace {

bool is_scale(double value) { return std::isfinite(value) && value > 0; }

}  // namespace

LossScaler::LossScaler(double fixed_scale) : dynamic_(false), state_{fixed_scale, 0, 1} {
  if (!is_scale(fixed_scale))
    fail(ErrorKind::kInvalidArgument, "static_loss_scale must be a finite number above 0, not ", fixed_scale);
}

LossScaler::LossScaler(const LossScaleOptions& options)
    : options_(options), dynamic_(true), state_{options.init_scale, 0, options.delayed_shift} {
  const auto require = [](bool good, const char* name, const char* expected, auto found) {
    if (!good) fail(ErrorKind::kInvalidArgument, "dynamic_loss_args: ", name, " must be ", expected, ", not ", found);
  };
  require(is_scale(options.init_scale), "init_scale", "a finite number above 0", options.init_scale);
  require(std::isfinite(options.scale_factor) && options.scale_factor > 1, "scale_factor", "a finite number above 1",
          options.scale_factor);
  require(options.scale_window >= 1, "scale_window", "at least 1", options.scale_window);
  require(is_scale(options.min_scale), "min_scale", "a finite number above 0", options.min_scale);
  require(options.delayed_shift >= 1, "delayed_shift", "at least 1", options.delayed_shift);
}

void LossScaler::update(bool overflow) {
  if (!dynamic_) return;
  if (overflow) {
    if (state_.hysteresis > 1)
      --state_.hysteresis;
    else
      state_.scale = std::max(state_.scale / options_.scale_factor, options_.min_scale);
    state_.good_steps = 0;
    return;
  }
  const bool window = ++state_.good_steps % options_.scale_window == 0;
  if (window || options_.consecutive_hysteresis) state_.hysteresis = options_.delayed_shift;
  // Never infinite: that could not be divided down again.
  if (window && std::isfinite(state_.scale * options_.scale_factor)) state_.scale *= options_.scale_factor;
}

void LossScaler::restore(const State& state) {
  if (!is_scale(state.scale) || state.good_steps < 0 || state.hysteresis < 1)
    fail(ErrorKind::kCorrupt, "the loss scale's saved state (scale ", state.scale, ", good steps ", state.good_steps,
         ", hysteresis ", state.hysteresis, ") is none that a loss scaler has");
  if (dynamic_) state_ = {state.scale, state.good_steps, std::min(state.hysteresis, options_.delayed_shift)};
}

}  // namespace shardsmith
