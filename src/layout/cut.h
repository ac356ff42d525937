// The heart of a plan: strided pieces of one file -> sequential reads. Pure; used by plan.cc.
#pragma once

#include <vector>

#include "layout/plan.h"

namespace shardsmith {

// What is to be copied from one file, as loops that start at byte `begin` of it. `copy.source` is not set yet.
struct Wish {
  uint64_t begin = 0;
  Copy copy;
};

// Orders the loops by source step, outermost largest, so that the source is walked from front to back, drops loops of
// one step and joins loops that are one run on both sides.
void normalise(Copy& copy);

// Bytes from the first to behind the last one that the loops from number `loop` on touch in the source.
uint64_t span(const Copy& copy, size_t loop = 0);

// Covers `wishes` (in any order, normalised) by reads of at most `options.max_read` bytes, in ascending order. Wishes
// whose bytes lie among one another, as query, key and value do in a fused matrix, share one pass over the file.
std::vector<Read> cut(std::vector<Wish> wishes, uint32_t file, const PlanOptions& options);

}  // namespace shardsmith
