// Norms of gradients: what clipping and the search for overflows need, in one pass over memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "comm/group.h"

namespace shardsmith {

// A norm over parts that several ranks hold: partial values are summed, or the largest taken, then finished.
class GradientNorm {
 public:
  // `type` above 0, infinity allowed. Throws kInvalidArgument otherwise.
  explicit GradientNorm(double type);
  bool is_maximum() const;
  // Of floating tensors of any dtype: sum of |x|^type, or the largest |x|; in double, so that no finite float16,
  // bfloat16 or float32 gradients overflow. Infinite or not a number if, and only if, an element is. For type 2 on the
  // CPU the result doesn't depend on the number of threads.
  double partial(const std::vector<at::Tensor>& gradients) const;
  // What `partial` gave on each rank of the group, together; `own` where there is no group. `device`: where ranks
  // exchange.
  double combine(double own, std::optional<Group>& group, at::Device device) const;
  // The norm from what `partial` gave, combined over all ranks.
  double finish(double combined) const;

 private:
  double type_;
};

}  // namespace shardsmith
