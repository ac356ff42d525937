// What the files of shardsmith._core share.
#pragma once

#include <pybind11/complex.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
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

// A model, and what one tensor-parallel rank holds of it.
struct RankModel {
  FamilyModel whole, local;
  std::unordered_map<std::string, size_t> places;  // Hugging Face name -> number of the tensor
  int rank = 0, degree = 1;
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

// What a file says, as a str; what is no UTF-8 in it is spelled out (\\xff).
pybind11::object text_of(const std::string& text);
pybind11::list texts_of(const std::vector<std::string>& texts);

// Value -> Python; a TensorRef becomes the TensorName of index.tensors[i].
pybind11::object to_python(const Value& value, const Index& index);

// Python -> Value; Leafs are collected into `content`, storages told apart by address. Throws kUnsupported for an
// object that is no plain value, with its path.
Value from_python(const pybind11::handle& object, PtContent* content);

}  // namespace shardsmith::python
