// A rank's parameters, all at once: a checkpoint may have tens of thousands, and an object of Python's for each piece
// of each takes longer than its bytes.
#include "bindings.h"

namespace py = pybind11;

namespace shardsmith::python {
namespace {

Leaves leaves_of(const RankModel& model, const std::vector<ParameterMemory>& parameters, int rank,
                 const std::string& name) {
  const NamePattern pattern(name);
  Leaves result;
  result.items.reserve(parameters.size());
  for (const ParameterMemory& parameter : parameters) {
    for (const RankPiece& piece : rank_pieces(model, std::get<0>(parameter))) {
      if (!piece.is_stored_by(rank)) continue;
      PieceMemory memory(parameter, piece.piece);
      Leaf leaf;
      leaf.tensor.dtype = memory.dtype;
      leaf.tensor.offset = memory.offset;
      leaf.tensor.size = piece.piece.shape;
      leaf.tensor.strides = std::move(memory.strides);
      leaf.tensor.name = pattern.of(piece.piece.name);
      leaf.tensor.global = piece.whole;
      leaf.tensor.box = piece.box;
      leaf.storage = memory.storage;
      leaf.storage_size = memory.storage_size;
      result.items.emplace_back(piece.piece.name, std::move(leaf));
    }
  }
  return result;
}

}  // namespace

PieceMemory::PieceMemory(const ParameterMemory& memory, const Piece& piece) {
  const auto& [name, word, address, size, begin, tensor_strides] = memory;
  if (piece.run) fail(ErrorKind::kInvalidArgument, name, ": the rows of ", piece.name, " don't lie together in it");
  if (tensor_strides.size() != piece.offset.size())
    fail(ErrorKind::kInvalidArgument, name, " has ", piece.offset.size(), " dimensions, not ", tensor_strides.size());
  dtype = dtype_of(word);
  storage = reinterpret_cast<std::byte*>(address);
  storage_size = size;
  offset = begin;
  for (size_t d = 0; d < tensor_strides.size(); ++d) offset += piece.offset[d] * tensor_strides[d];
  for (const int d : piece.permutation) strides.push_back(tensor_strides[static_cast<size_t>(d)]);
}

void bind_parameters(py::module_& m) {
  py::class_<Leaves>(m, "Leaves")
      .def(py::init(&leaves_of), py::arg("model"), py::arg("parameters"), py::arg("rank"), py::arg("pattern"))
      .def("add",
           [](Leaves& leaves, const std::string& name, const Leaf& leaf) { leaves.items.emplace_back(name, leaf); });
}

}  // namespace shardsmith::python
