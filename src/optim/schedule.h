// Learning-rate schedules as functions of the step. Pure; no torch.
#pragma once

#include <cstdint>
#include <string>

namespace shardsmith {

// The factor on the learning rate for update `step` (0-based): linear from 0 to 1 over `warmup_steps`, then "constant",
// "linear" to 0 at `total_steps`, or "cosine" (half a period to 0). As in transformers' get_*_schedule_with_warmup.
// Throws kInvalidArgument that lists the kinds for another one.
double schedule_factor(const std::string& kind, int64_t step, int64_t warmup_steps, int64_t total_steps);

}  // namespace shardsmith
