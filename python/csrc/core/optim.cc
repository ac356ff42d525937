// Learning-rate schedules and the loss scale.
#include "bindings.h"
#include "optim/loss_scale.h"
#include "optim/schedule.h"

namespace py = pybind11;

namespace shardsmith::python {

void bind_optim(py::module_& m) {
  py::class_<LossScaler>(m, "LossScaler")
      .def(py::init([](double init_scale, double scale_factor, int64_t scale_window, double min_scale,
                       int64_t delayed_shift, bool consecutive_hysteresis) {
             return LossScaler(LossScaleOptions{init_scale, scale_factor, scale_window, min_scale, delayed_shift,
                                                consecutive_hysteresis});
           }),
           py::kw_only(), py::arg("init_scale") = LossScaleOptions{}.init_scale,
           py::arg("scale_factor") = LossScaleOptions{}.scale_factor,
           py::arg("scale_window") = LossScaleOptions{}.scale_window,
           py::arg("min_scale") = LossScaleOptions{}.min_scale,
           py::arg("delayed_shift") = LossScaleOptions{}.delayed_shift,
           py::arg("consecutive_hysteresis") = LossScaleOptions{}.consecutive_hysteresis)
      .def_static("fixed", [](double scale) { return LossScaler(scale); })
      .def_property_readonly("loss_scale", &LossScaler::scale)
      .def_property_readonly("dynamic", &LossScaler::is_dynamic)
      .def("update", &LossScaler::update, py::arg("overflow"))
      .def("state",
           [](const LossScaler& scaler) {
             const LossScaler::State& s = scaler.state();
             return py::make_tuple(s.scale, s.good_steps, s.hysteresis);
           })
      .def(
          "restore",
          [](LossScaler& scaler, double scale, int64_t good_steps, int64_t hysteresis) {
            scaler.restore({scale, good_steps, hysteresis});
          },
          py::arg("scale"), py::arg("good_steps"), py::arg("hysteresis"));

  m.def("schedule_factor", &schedule_factor, py::arg("kind"), py::arg("step"), py::arg("warmup_steps"),
        py::arg("total_steps"));
}

}  // namespace shardsmith::python
