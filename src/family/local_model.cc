#include "family/local_model.h"

#include <algorithm>

#include "base/error.h"
#include "family/tensor_parallel.h"

namespace shardsmith {
namespace {

// A piece's extent in the dimensions of the tensor that it lies in.
Shape extent_in_tensor(const Piece& piece) {
  Shape extent(piece.shape.size());
  for (size_t d = 0; d < piece.shape.size(); ++d) extent[static_cast<size_t>(piece.permutation[d])] = piece.shape[d];
  return extent;
}

// Where the pieces lie side by side along a dimension, each begins where the one before now ends. Pieces in runs take
// turns: a rank holds whole runs (heads), so their order and distance stay, and there are fewer.
void lay_out(FamilyTensor& tensor) {
  for (size_t k = 0; k < tensor.shape.size(); ++k) {
    std::vector<Piece*> order;
    for (Piece& piece : tensor.pieces) order.push_back(&piece);
    std::stable_sort(order.begin(), order.end(),
                     [&](const Piece* a, const Piece* b) { return a->offset[k] < b->offset[k]; });
    const bool side_by_side = order.front()->offset[k] != order.back()->offset[k];
    int64_t at = 0;
    for (Piece* piece : order) {
      const int64_t extent = extent_in_tensor(*piece)[k];
      if (piece->run > 0 && static_cast<size_t>(piece->permutation[0]) == k) {
        at += extent;  // the runs of all pieces alternate as before; there are fewer
        continue;
      }
      const bool in_runs = piece->run > 0 && static_cast<size_t>(piece->permutation[0]) == k;
      if (!in_runs) piece->offset[k] = side_by_side ? at : 0;
      at = side_by_side ? at + extent : extent;
    }
    tensor.shape[k] = at;
  }
}

}  // namespace

FamilyModel local_model(const FamilyModel& model, int rank, int degree) {
  check_tensor_parallel(model.description, degree);
  FamilyModel local = model;
  if (degree == 1) return local;
  for (FamilyTensor& tensor : local.tensors) {
    for (Piece& piece : tensor.pieces)
      piece.shape = tensor_parallel_box(model.description, piece.name, piece.shape, rank, degree).extent;
    lay_out(tensor);
  }
  return local;
}

int tensor_parallel_copies(const ModelDescription& model, const std::string& name, const Shape& shape, int degree) {
  const Box first = tensor_parallel_box(model, name, shape, 0, degree);
  int copies = 1;
  while (copies < degree && tensor_parallel_box(model, name, shape, copies, degree) == first) ++copies;
  return copies;
}

}  // namespace shardsmith
