// The factor on the loss that keeps small float16 gradients from vanishing. Pure; no torch.
#pragma once

#include <cstdint>

namespace shardsmith {

struct LossScaleOptions {
  double init_scale = 4294967296.0;  // 2^32
  double scale_factor = 2.0;
  int64_t scale_window = 1000;  // good steps until the scale grows
  double min_scale = 1.0;
  int64_t delayed_shift = 1;  // how many overflows in all until the scale falls
  bool consecutive_hysteresis = false;
};

// A fixed scale, or one that adapts, by the rule documented for the dynamic loss scaler of DeepSpeed and Megatron:
//   overflow:  the hysteresis (delayed_shift at first) counts down to 1; once there, scale = max(scale / factor, min);
//   otherwise: every scale_window good steps since the last overflow, scale *= factor and the hysteresis is full again;
//              with consecutive_hysteresis it is full again after each good step instead.
// With delayed_shift 1 and above min_scale this is what torch.amp.GradScaler does. One thread.
class LossScaler {
 public:
  // All that changes; what a checkpoint keeps.
  struct State {
    double scale = 1.0;
    int64_t good_steps = 0;  // since the last overflow
    int64_t hysteresis = 1;  // overflows left until the scale falls
  };
  // Throw kInvalidArgument for values that make no sense, with the argument's name.
  explicit LossScaler(double fixed_scale);
  explicit LossScaler(const LossScaleOptions& options);

  double scale() const { return state_.scale; }
  bool is_dynamic() const { return dynamic_; }
  // After every step, skipped or not.
  void update(bool overflow);

  const State& state() const { return state_; }
  // Of an earlier run. A fixed scale stays what it is now. Throws kCorrupt for a state that no scaler has.
  void restore(const State& state);

 private:
  LossScaleOptions options_;
  bool dynamic_;
  State state_;
};

}  // namespace shardsmith
