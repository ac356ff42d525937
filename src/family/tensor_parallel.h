// Tensor parallelism: which part of a logical tensor each tensor-parallel rank holds. Pure.
#pragma once

#include <string>

#include "family/family.h"

namespace shardsmith {

// Throws kInvalidArgument that says why a degree can't work and lists those that do, unless heads and KV heads can be
// dealt out evenly and the MLP's columns suffice. (A KV head may be held by several ranks, where there are more ranks
// than KV heads; the MLP's shares may differ by a column.)
void check_tensor_parallel(const ModelDescription& model, int degree);

// The box of logical tensor `name` of `shape` that rank `rank` of `degree` holds:
//   query, key, value (weight and bias), gate, up, dense1: rows, by whole heads where there are heads
//   attention.dense, down, dense2 weights:                 columns
//   word_embedding, lm_head (weight and bias):             rows; the vocabulary padded to a multiple of the degree, the
//                                                          padding in no box, so the last rank's may be smaller or
//                                                          empty
//   all else (norms, row-parallel biases, position and token type embeddings, lm_head.transform, pooler, classifier):
//                                                          whole, on every rank
Box tensor_parallel_box(const ModelDescription& model, const std::string& name, const Shape& shape, int rank,
                        int degree);

}  // namespace shardsmith
