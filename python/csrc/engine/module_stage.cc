// Torch modules of any kind.
#include "pipeline/module_stage.h"

#include "base/value.h"
#include "bindings.h"
#include "family/family.h"

namespace py = pybind11;

namespace shardsmith::python {
namespace {

std::unique_ptr<ModuleStage> make(const std::string& config_json, std::map<std::string, at::Tensor> parameters,
                                  std::vector<at::Tensor> buffers, const std::optional<GroupHandle>& rdp_group,
                                  const std::optional<GroupHandle>& tp_group, bool prescaled_batch, double peer_timeout,
                                  double bucket_cap_mb, bool shard_optimizer_state) {
  const FamilyModel model = describe_model(parse_json(config_json, "the module's description"));
  ModuleStageOptions options;
  options.replicas = group_of(rdp_group, "data-parallel group", peer_timeout);
  options.tensor = group_of(tp_group, "tensor-parallel group", peer_timeout);
  options.prescaled_batch = prescaled_batch;
  options.bucket_cap_mb = bucket_cap_mb;
  options.shard_optimizer_state = shard_optimizer_state;
  const int rank = options.tensor ? options.tensor->rank() : 0, degree = options.tensor ? options.tensor->size() : 1;
  return std::make_unique<ModuleStage>(model, Parameters(model, std::move(parameters), rank, degree),
                                       std::move(buffers), std::move(options));
}

std::vector<at::Tensor> tensors_of(const std::vector<std::optional<at::Tensor>>& given) {
  std::vector<at::Tensor> tensors;
  for (const auto& tensor : given) tensors.push_back(tensor.value_or(at::Tensor()));
  return tensors;
}

}  // namespace

void bind_module_stage(py::module_& m) {
  py::class_<ModuleStage> stage(m, "ModuleStage");
  stage
      .def(py::init(&make), py::arg("config_json"), py::arg("parameters"), py::arg("buffers"),
           py::arg("rdp_group") = py::none(), py::arg("tp_group") = py::none(), py::arg("prescaled_batch") = true,
           py::arg("peer_timeout") = 300.0, py::arg("bucket_cap_mb") = 25.0, py::arg("shard_optimizer_state") = false)
      .def("begin_step", &ModuleStage::begin_step, py::arg("loss_scale") = 1.0, Unlocked())
      .def(
          "backward",
          [](ModuleStage& self, const std::vector<at::Tensor>& losses,
             const std::vector<std::optional<at::Tensor>>& gradients,
             double scale) { self.backward(losses, tensors_of(gradients), scale); },
          py::arg("losses"), py::arg("gradients"), py::arg("scale"), Unlocked())
      .def("sync_buffers", &ModuleStage::sync_buffers, Unlocked());
  bind_gradients(stage);
}

}  // namespace shardsmith::python
