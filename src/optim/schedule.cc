#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace shardsmith {

double schedule_factor(const std::string& kind, int64_t step, int64_t warmup_steps, int64_t total_steps) {
  if (kind != "constant" && kind != "linear" && kind != "cosine") {
    const std::string near = nearest(kind, {"constant", "linear", "cosine"});
    fail(ErrorKind::kInvalidArgument, "lr_scheduler_type '", kind, "' is not known; there are constant, linear, cosine",
         near.empty() ? "" : " (did you mean " + near + "?)");
  }
  if (step < warmup_steps) return static_cast<double>(step) / static_cast<double>(std::max<int64_t>(1, warmup_steps));
  if (kind == "constant") return 1.0;
  const double progress =
      static_cast<double>(step - warmup_steps) / static_cast<double>(std::max<int64_t>(1, total_steps - warmup_steps));
  if (kind == "linear") return std::max(0.0, 1.0 - progress);
  return std::max(0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * progress)));
}

}  // namespace shardsmith
