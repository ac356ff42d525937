// Manual partitions, and decisions that are kept in a file.
#include "layout/partition.h"
#include "bindings.h"

namespace py = pybind11;

namespace shardsmith::python {

void bind_partition(py::module_& m) {
  m.def(
      "manual_partition",
      [](const std::vector<std::pair<std::string, int>>& names, int layers, int stages,
         const std::vector<std::pair<std::string, int>>& wishes, int default_stage) {
        std::vector<PlacedName> placed;
        for (const auto& [name, place] : names) placed.push_back({name, place});
        std::vector<PartitionWish> wished;
        for (const auto& [path, stage] : wishes) wished.push_back({path, stage});
        return manual_partition(placed, layers, stages, wished, default_stage).first;
      },
      py::arg("names"), py::arg("layers"), py::arg("stages"), py::arg("wishes"), py::arg("default_stage"));
  m.def(
      "partition_to_json",
      [](const std::vector<int>& first) { return to_json(partition_value(Partition{first}), 2) + "\n"; },
      py::arg("first"));
  m.def(
      "partition_from_json",
      [](const std::string& text, int layers, int stages, const std::string& where) {
        return partition_from(parse_json(text, where), layers, stages, where).first;
      },
      py::arg("text"), py::arg("layers"), py::arg("stages"), py::arg("where"));
}

}  // namespace shardsmith::python
