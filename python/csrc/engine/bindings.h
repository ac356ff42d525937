// What the files of shardsmith._engine share.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <optional>

#include "comm/group.h"

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

void bind_layers(pybind11::module_& m);        // functions between a transformer's products, for layers of their own
void bind_module_stage(pybind11::module_& m);  // torch modules of any kind

}  // namespace shardsmith::python
