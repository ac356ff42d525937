// shardsmith::Error -> shardsmith.errors.Error. Include after pybind11.
#pragma once

#include "base/error.h"

namespace shardsmith::python {

// For a module's init function: every Error thrown by one of its functions becomes the Python class.
inline void register_errors() {
  pybind11::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Error& e) {
      const pybind11::object type = pybind11::module_::import("shardsmith.errors").attr("Error");
      const pybind11::object error = type(std::string(to_string(e.kind())), std::string(e.what()), e.rank());
      PyErr_SetObject(type.ptr(), error.ptr());
    }
  });
}

}  // namespace shardsmith::python
