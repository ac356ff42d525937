// A model as one tensor-parallel rank holds it: the same tensors under the same names, smaller. Pure.
#pragma once

#include "family/family.h"

namespace shardsmith {

// Tensors and pieces with the shapes of `rank`'s boxes (tensor_parallel_box), laid out as in the whole: a fused tensor
// holds its rank's share of each piece, in the same order. The description is the whole model's. Throws what
// check_tensor_parallel throws.
FamilyModel local_model(const FamilyModel& model, int rank, int degree);

// How many neighbouring ranks hold the same elements of a logical tensor: 1 where each holds its own, `degree` where
// all hold the whole, between where ranks share a KV head.
int tensor_parallel_copies(const ModelDescription& model, const std::string& name, const Shape& shape, int degree);

}  // namespace shardsmith
