// What the tensor-parallel ranks of a stage compute on together, of what each was given.
#pragma once

#include "nn/transformer.h"

namespace shardsmith {

// With `own_batch` every rank brings samples of its own: all of them, in the order of the ranks. Otherwise all must
// have brought the same: that is checked. All ranks throw kInvalidArgument that says which of them differs from rank 0,
// and how, where shapes differ or one lacks labels or position_ids that another has.
Inputs group_batch(const Inputs& own, const TensorParallel& ranks, bool own_batch);

}  // namespace shardsmith
