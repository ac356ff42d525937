// Meshes, families and partitions.
#include <algorithm>

#include "bindings.h"
#include "family/local_model.h"
#include "family/tensor_parallel.h"
#include "layout/mesh.h"
#include "layout/partition.h"

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
  constexpr const char* kHeads[] = {"causal_lm", "masked_lm", "classification", "none"};
  result["head"] = kHeads[static_cast<size_t>(d.head)];
  result["has_pooler"] = d.has_pooler;
  return result;
}

py::list tensors_of(const FamilyModel& model) {
  py::list result;
  for (const FamilyTensor& t : model.tensors) result.append(py::make_tuple(t.hf_name, t.shape, t.place, t.also_last));
  return result;
}

py::list pieces_of(const RankModel& model, const std::string& hf_name) {
  py::list result;
  for (const RankPiece& r : rank_pieces(model, hf_name)) {
    const Piece& p = r.piece;
    result.append(
        py::make_tuple(p.name, p.shape, p.permutation, p.offset, p.run, p.step, r.whole, r.box.offset, r.copies));
  }
  return result;
}

// All at once: asking for each tensor's pieces takes longer than naming them.
py::dict piece_names(const RankModel& model) {
  py::dict result;
  for (const FamilyTensor& tensor : model.whole.tensors) {
    py::list names;
    for (const Piece& piece : tensor.pieces) names.append(piece.name);
    result[py::str(tensor.hf_name)] = names;
  }
  return result;
}

// Names of tensors of which a piece's rows don't lie together.
std::vector<std::string> in_runs(const RankModel& model) {
  std::vector<std::string> names;
  for (const FamilyTensor& tensor : model.local.tensors)
    if (std::ranges::any_of(tensor.pieces, [](const Piece& piece) { return piece.run > 0; }))
      names.push_back(tensor.hf_name);
  return names;
}

RankModel make_model(const std::string& json, int rank, int degree) {
  RankModel model;
  model.whole = describe_model(parse_json(json, "config.json"));
  model.local = local_model(model.whole, rank, degree);
  model.rank = rank;
  model.degree = degree;
  for (size_t t = 0; t < model.local.tensors.size(); ++t) model.places.emplace(model.local.tensors[t].hf_name, t);
  return model;
}

std::vector<std::string> names_of_stage(const RankModel& model, const std::vector<int>& first, int stage) {
  std::vector<std::string> names;
  for (const size_t i : stage_tensors(model.whole, Partition{first}, stage))
    names.push_back(model.whole.tensors[i].hf_name);
  return names;
}

}  // namespace

std::vector<RankPiece> rank_pieces(const RankModel& model, const std::string& hf_name) {
  const ModelDescription& description = model.whole.description;
  const auto place = model.places.find(hf_name);
  if (place == model.places.end())
    fail(ErrorKind::kInvalidArgument, "'", hf_name, "' is not part of a ", description.model_type, " model");
  const std::vector<Piece>& local = model.local.tensors[place->second].pieces;
  std::vector<RankPiece> result;
  result.reserve(local.size());
  for (size_t i = 0; i < local.size(); ++i) {
    const Shape& whole = model.whole.tensors[place->second].pieces[i].shape;
    result.push_back({local[i], whole, tensor_parallel_box(description, local[i].name, whole, model.rank, model.degree),
                      tensor_parallel_copies(description, local[i].name, whole, model.degree)});
  }
  return result;
}

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
      .def("mp_group", &Mesh::mp_group)
      .def("groups", [](const Mesh& mesh, const std::string& kind) {
        using Kind = Mesh::Kind;
        for (const auto& [word, value] :
             {std::pair{"pp", Kind::kPp}, {"tp", Kind::kTp}, {"rdp", Kind::kRdp}, {"dp", Kind::kDp}, {"mp", Kind::kMp}})
          if (kind == word) return mesh.groups(value);
        fail(ErrorKind::kInvalidArgument, "a mesh has groups pp, tp, rdp, dp and mp, not '", kind, "'");
      });

  py::class_<RankModel>(m, "Model")
      .def(py::init(&make_model), py::arg("config_json"), py::arg("tp_rank") = 0, py::arg("tp_size") = 1)
      .def_property_readonly("description", [](const RankModel& f) { return description_of(f.whole.description); })
      .def_property_readonly("tensors", [](const RankModel& f) { return tensors_of(f.local); })
      .def_property_readonly("architecture", [](const RankModel& f) { return f.whole.architecture; })
      .def_property_readonly("aliases",
                             [](const RankModel& f) {
                               std::map<std::string, std::string> result;
                               for (const FamilyTensor& tensor : f.whole.tensors)
                                 for (const std::string& alias : tensor.aliases) result[alias] = tensor.hf_name;
                               return result;
                             })
      .def_property_readonly("tied_names", [](const RankModel& f) { return f.whole.tied_names; })
      .def_property_readonly("ignored_suffixes", [](const RankModel& f) { return f.whole.ignored_suffixes; })
      .def_property_readonly("prefix", [](const RankModel& f) { return f.whole.prefix; })
      .def("pieces", &pieces_of)
      .def_property_readonly("piece_names", &piece_names)
      .def_property_readonly("in_runs", &in_runs)
      .def(
          "partition",
          [](const RankModel& f, int stages, double memory_weight, int64_t sequence) {
            return make_partition(model_costs(f.whole, memory_weight, sequence).costs, stages).first;
          },
          py::arg("stages"), py::arg("memory_weight") = 0.8, py::arg("sequence") = 1024)
      .def(
          "balance",
          [](const RankModel& f, const std::vector<int>& first, double memory_weight, int64_t sequence) {
            return balance(model_costs(f.whole, memory_weight, sequence).costs, Partition{first});
          },
          py::arg("first"), py::arg("memory_weight") = 0.8, py::arg("sequence") = 1024)
      .def("stage_tensors", &names_of_stage, py::arg("first"), py::arg("stage"));

  m.def("supported_model_types", &supported_model_types);
}

}  // namespace shardsmith::python
