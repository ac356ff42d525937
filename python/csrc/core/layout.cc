// Meshes, families, partitions and schedules.
#include "bindings.h"
#include "family/family.h"
#include "layout/mesh.h"
#include "layout/partition.h"
#include "optim/schedule.h"

namespace py = pybind11;

namespace shardsmith::python {
namespace {

py::dict description_of(const ModelDescription& d) {
  py::dict result;
  result["model_type"] = d.model_type;
  result["num_layers"] = d.num_layers;
  result["hidden_size"] = d.hidden_size;
  result["num_attention_heads"] = d.num_attention_heads;
  result["num_key_value_heads"] = d.num_key_value_heads;
  result["attention_head_size"] = d.attention_head_size;
  result["intermediate_size"] = d.intermediate_size;
  result["vocab_size"] = d.vocab_size;
  result["num_positions"] = d.num_positions;
  result["tied_head"] = d.tied_head;
  result["causal"] = d.causal;
  result["num_labels"] = d.num_labels;
  return result;
}

py::list tensors_of(const FamilyModel& model) {
  py::list result;
  for (const FamilyTensor& t : model.tensors) result.append(py::make_tuple(t.hf_name, t.shape, t.place, t.also_last));
  return result;
}

py::list pieces_of(const FamilyModel& model, const std::string& hf_name) {
  py::list result;
  for (const FamilyTensor& t : model.tensors) {
    if (t.hf_name != hf_name) continue;
    for (const Piece& p : t.pieces)
      result.append(py::make_tuple(p.name, p.shape, p.permutation, p.offset, p.run, p.step));
    return result;
  }
  fail(ErrorKind::kInvalidArgument, "'", hf_name, "' is not part of a ", model.description.model_type, " model");
}

std::vector<std::string> names_of_stage(const FamilyModel& model, const std::vector<int>& first, int stage) {
  std::vector<std::string> names;
  for (const size_t i : stage_tensors(model, Partition{first}, stage)) names.push_back(model.tensors[i].hf_name);
  return names;
}

}  // namespace

void bind_layout(py::module_& m) {
  py::class_<Mesh>(m, "Mesh")
      .def(py::init<int, int, int, const std::string&>(), py::arg("world_size"), py::arg("pp"), py::arg("tp") = 1,
           py::arg("placement") = "cluster")
      .def_property_readonly("world_size", &Mesh::world_size)
      .def_property_readonly("pp_size", &Mesh::pp_size)
      .def_property_readonly("tp_size", &Mesh::tp_size)
      .def_property_readonly("rdp_size", &Mesh::rdp_size)
      .def_property_readonly("dp_size", &Mesh::dp_size)
      .def_property_readonly("mp_size", &Mesh::mp_size)
      .def_property_readonly("placement", &Mesh::placement)
      .def("coordinates",
           [](const Mesh& mesh, int rank) {
             const Coordinates c = mesh.coordinates(rank);
             return py::make_tuple(c.pp, c.tp, c.rdp);
           })
      .def("rank",
           [](const Mesh& mesh, int pp, int tp, int rdp) {
             return mesh.rank({pp, tp, rdp});
           })
      .def("pp_group", &Mesh::pp_group)
      .def("tp_group", &Mesh::tp_group)
      .def("rdp_group", &Mesh::rdp_group)
      .def("dp_group", &Mesh::dp_group)
      .def("mp_group", &Mesh::mp_group);

  py::class_<FamilyModel>(m, "Model")
      .def(py::init([](const std::string& json) { return describe_model(parse_json(json, "config.json")); }))
      .def_property_readonly("description", [](const FamilyModel& f) { return description_of(f.description); })
      .def_property_readonly("tensors", &tensors_of)
      .def_readonly("architecture", &FamilyModel::architecture)
      .def_readonly("tied_names", &FamilyModel::tied_names)
      .def_readonly("ignored_suffixes", &FamilyModel::ignored_suffixes)
      .def("pieces", &pieces_of)
      .def(
          "partition",
          [](const FamilyModel& f, int stages, double memory_weight, int64_t sequence) {
            return make_partition(model_costs(f, memory_weight, sequence).costs, stages).first;
          },
          py::arg("stages"), py::arg("memory_weight") = 0.8, py::arg("sequence") = 1024)
      .def(
          "balance",
          [](const FamilyModel& f, const std::vector<int>& first, double memory_weight, int64_t sequence) {
            return balance(model_costs(f, memory_weight, sequence).costs, Partition{first});
          },
          py::arg("first"), py::arg("memory_weight") = 0.8, py::arg("sequence") = 1024)
      .def("stage_tensors", &names_of_stage, py::arg("first"), py::arg("stage"));

  m.def("supported_model_types", &supported_model_types);
  m.def("schedule_factor", &schedule_factor, py::arg("kind"), py::arg("step"), py::arg("warmup_steps"),
        py::arg("total_steps"));
}

}  // namespace shardsmith::python
