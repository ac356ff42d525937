// The extension module shardsmith._core: the torch-free half. Imports in milliseconds.
#include "bindings.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, m) {
  m.doc() = "The torch-free half of Shardsmith. See _core.pyi.";
  shardsmith::python::register_errors();
  shardsmith::python::bind_layout(m);
  shardsmith::python::bind_partition(m);
  shardsmith::python::bind_memory(m);
  shardsmith::python::bind_optim(m);
  shardsmith::python::bind_index(m);
  shardsmith::python::bind_checkpoint(m);
  shardsmith::python::bind_saving(m);
  shardsmith::python::bind_parameters(m);
}
