// shardsmith::Error -> shardsmith.errors.Error. Include after pybind11.
#pragma once

#include <string_view>

#include "base/error.h"

namespace shardsmith::python {

// For a module's init function: every Error thrown by one of its functions becomes the Python class.
inline void register_errors() {
  pybind11::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Error& e) {
      const pybind11::object type = pybind11::module_::import("shardsmith.errors").attr("Error");
      // A name in a file may be no UTF-8.
      const std::string_view said = e.what();
      const auto text = pybind11::reinterpret_steal<pybind11::object>(
          PyUnicode_DecodeUTF8(said.data(), static_cast<Py_ssize_t>(said.size()), "backslashreplace"));
      const pybind11::object error = type(std::string(to_string(e.kind())), text, e.rank());
      PyErr_SetObject(type.ptr(), error.ptr());
    }
  });
}

}  // namespace shardsmith::python
