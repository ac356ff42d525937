// The look-up of word embeddings, whose gradient touches only the rows that were looked up.
#pragma once

#include <ATen/core/Tensor.h>

namespace shardsmith {

// weight [V, H], ids [...] int64 -> [..., H]. Rows of `padding_idx` (-1: none) are looked up but not trained.
// A rank that holds a part of the vocabulary gives the id of its first row; ids of others' rows give zeros, so that the
// ranks' results add up to the whole's.
//
// Where the weight is a leaf without hooks, the backward adds the rows straight into weight.grad, which is made of
// zeros once: torch's own would make and add a whole [V, H] for every microbatch.
at::Tensor embed_words(const at::Tensor& weight, const at::Tensor& ids, int64_t padding_idx, int64_t first_row = 0,
                       bool is_part = false);

}  // namespace shardsmith
