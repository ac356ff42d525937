// What the files of shardsmith._engine share.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <optional>

#include "comm/group.h"
#include "optim/reducer.h"

namespace shardsmith::python {

using GroupHandle = c10::intrusive_ptr<c10d::ProcessGroup>;
using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;

inline std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

inline std::optional<Group> group_of(const std::optional<GroupHandle>& handle, const char* name, double timeout) {
  if (!handle || !*handle) return std::nullopt;
  return Group(*handle, name, milliseconds_of(timeout));
}

// What Stage and ModuleStage do with gradients and shards.
template <typename S>
void bind_gradients(pybind11::class_<S>& stage) {
  namespace py = pybind11;
  stage.def("finish_step", &S::finish_step, py::arg("reduce"), Unlocked())
      .def("sync_parameters", &S::sync_parameters, Unlocked())
      .def("shards",
           [](const S& self) {
             py::list shards;
             for (const Shard& shard : self.shards())
               shards.append(py::make_tuple(shard.name, shard.begin, shard.end, shard.bucket));
             return shards;
           })
      .def_property_readonly("buckets", &S::buckets)
      .def("start_gather", &S::start_gather, py::arg("bucket"), Unlocked())
      .def("gather_shards", &S::gather_shards, Unlocked())
      .def("finish_gather", &S::finish_gather, Unlocked())
      .def("grad_norm", &S::grad_norm, py::arg("norm_type") = 2.0, Unlocked())
      .def("clip_grad_norm", &S::clip_grad_norm, py::arg("max_norm"), py::arg("norm_type") = 2.0, Unlocked());
}

void bind_layers(pybind11::module_& m);        // functions between a transformer's products, for layers of their own
void bind_module_stage(pybind11::module_& m);  // torch modules of any kind

}  // namespace shardsmith::python
