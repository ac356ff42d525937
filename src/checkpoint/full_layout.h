// One file of a full checkpoint, merged from what the ranks announce: which tensors it has, as wholes, and who holds
// which box of each. Arithmetic alone: every rank comes to the same file from the same announcements.
#pragma once

#include <string>
#include <vector>

#include "base/value.h"
#include "family/family.h"
#include "format/pt.h"
#include "layout/index.h"

namespace shardsmith {

// A box of one of the file's tensors, in that tensor's own coordinates.
struct FullPart {
  Box box;
  std::vector<int> holders;         // ranks, ascending; each has all of it
  const std::byte* data = nullptr;  // of the box's first element, where this rank holds it
  Strides strides;                  // in elements, of `data`
};

struct FullTensor {
  std::string name;
  Dtype dtype = Dtype::kF32;
  Shape shape;
  std::vector<FullPart> parts;  // tile it
};

struct FullFile {
  PtContent content;                  // whole tensors, each in a storage of its own, which has a size and no bytes
  std::vector<FullTensor> tensors;    // by storage
  std::vector<std::string> left_out;  // names that the family doesn't know
};

// What this rank holds of a file, for the others: the tree of values and each tensor's name, type, shape and box.
// `prefix` ("model/") is taken off the names. Names that aren't in the slice list are this rank's own tensors. Throws
// kInvalidArgument for a tensor that leaves its storage, or whose bytes are not in memory.
Value announce_full(const PtContent& content, const std::string& prefix, const std::string& what);

// `announcements`: of all ranks, by rank; None for a rank that has no such file. `own`: this rank's content, or null.
// Trees of values are merged: dicts key by key, lists of dicts of one length item by item, other lists of texts one
// after the other without repetition; of anything else the first rank's that is not None counts. With `family` the tree
// is a dict of the Hugging Face names instead, ties under all of their names. Throws kInvalidArgument that names rank
// and tensor where ranks contradict each other, or where the boxes don't give each element once.
FullFile merge_full(const std::vector<Value>& announcements, int rank, const PtContent* own, const FamilyModel* family,
                    const std::string& what);

}  // namespace shardsmith
