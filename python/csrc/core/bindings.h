// What the files of shardsmith._core share.
#pragma once

#include <pybind11/complex.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "../errors.h"
#include "base/value.h"
#include "family/family.h"
#include "format/pt.h"
#include "layout/index.h"

namespace shardsmith::python {

void bind_layout(pybind11::module_& m);      // meshes, families, partitions
void bind_partition(pybind11::module_& m);   // manual partitions, decisions in files
void bind_memory(pybind11::module_& m);      // what training needs; after bind_layout
void bind_optim(pybind11::module_& m);       // learning-rate schedules, the loss scale
void bind_index(pybind11::module_& m);       // readers and Index
void bind_checkpoint(pybind11::module_& m);  // scan, find, verify
void bind_saving(pybind11::module_& m);      // at once and in the background
void bind_parameters(pybind11::module_& m);  // what is saved of a rank's parameters; after bind_saving

// A model, and what one tensor-parallel rank holds of it.
struct RankModel {
  FamilyModel whole, local;
  std::unordered_map<std::string, size_t> places;  // Hugging Face name -> number of the tensor
  int rank = 0, degree = 1;
};

// That rank's part of a logical tensor. Points into the model.
struct RankPiece {
  const Piece& piece;
  const Shape& whole;  // the logical tensor's
  Box box;             // of the logical tensor
  int copies;          // neighbouring tensor-parallel ranks that hold the same part

  bool is_stored_by(int rank) const { return rank % copies == 0; }
};
std::vector<RankPiece> rank_pieces(const RankModel& model, const std::string& hf_name);

// The memory of a Hugging Face shaped tensor: its name, torch's word for its dtype, address and bytes of its storage;
// elements of the storage before it, and its strides in elements.
using ParameterMemory = std::tuple<std::string, std::string, uintptr_t, uint64_t, int64_t, Strides>;

// Where a piece whose rows lie together stands in such memory.
struct PieceMemory {
  PieceMemory(const ParameterMemory& memory, const Piece& piece);
  Dtype dtype;
  std::byte* storage;
  uint64_t storage_size;  // bytes
  int64_t offset;         // elements
  Strides strides;        // elements
};

// A name with a {} where a logical name stands.
struct NamePattern {
  explicit NamePattern(const std::string& text) {
    const size_t place = text.find("{}");
    before = text.substr(0, place);
    if (place != std::string::npos) after = text.substr(place + 2);
  }
  std::string of(const std::string& logical) const { return before + logical + after; }
  std::string before, after;
};

// A tensor in a value tree that was read.
struct TensorName {
  std::string name;
};

// A tensor in a value tree that is to be saved.
struct Leaf {
  PtTensor tensor;
  const std::byte* storage = nullptr;
  uint64_t storage_size = 0;
};

Dtype dtype_of(const std::string& torch_word);  // kUnsupported where there is none

// Tensors by name, as a dict of Leafs would have them: a file may hold tens of thousands, and an object of Python's for
// each takes longer than writing it.
struct Leaves {
  std::vector<std::pair<std::string, Leaf>> items;
};

// What a file says, as a str; what is no UTF-8 in it is spelled out (\\xff).
pybind11::object text_of(const std::string& text);
pybind11::list texts_of(const std::vector<std::string>& texts);

// Value -> Python; a TensorRef becomes the TensorName of index.tensors[i].
pybind11::object to_python(const Value& value, const Index& index);

// Python -> Value; Leafs are collected into `content`, storages told apart by address. Leaves are moved out of. Throws
// kUnsupported for an object that is no plain value, with its path.
Value from_python(const pybind11::handle& object, PtContent* content);

}  // namespace shardsmith::python
