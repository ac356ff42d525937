// The memory that training needs.
#include "bindings.h"
#include "pipeline/training_memory.h"

namespace py = pybind11;

namespace shardsmith::python {

void bind_memory(py::module_& m) {
  m.def(
      "activation_memory",
      [](const RankModel& model, int64_t rows, int64_t sequence, int tp, bool split_sequence,
         const std::string& precision) {
        const ActivationMemory memory(model.whole, {rows, sequence, tp, split_sequence, precision_of(precision)});
        py::dict result;
        result["hidden"] = memory.hidden();
        result["embedding"] = memory.embedding();
        result["layer"] = memory.layer();
        result["head"] = memory.head();
        result["loss"] = memory.loss();
        return result;
      },
      py::arg("model"), py::kw_only(), py::arg("rows"), py::arg("sequence"), py::arg("tp") = 1,
      py::arg("split_sequence") = false, py::arg("precision") = "fp32");
  m.def(
      "training_memory",
      [](const RankModel& model, const std::vector<int>& first, int stage, int64_t rows, int64_t sequence, int tp,
         int rdp, int microbatches, const std::string& pipeline, int active_microbatches, bool accumulates,
         bool split_sequence, const std::string& precision, bool shard_optimizer_state,
         const std::string& activation_checkpointing) {
        TrainingOptions options;
        options.work = {rows, sequence, tp, split_sequence, precision_of(precision)};
        options.rdp = rdp;
        options.microbatches = microbatches;
        options.schedule = schedule_kind(pipeline);
        options.active_microbatches = active_microbatches;
        options.accumulates = accumulates;
        options.shard_optimizer_state = shard_optimizer_state;
        options.checkpointed_layers = checkpointed_layers(activation_checkpointing);
        const TrainingMemory memory = training_memory(model.whole, Partition{first}, stage, options);
        py::dict result;
        for (const auto& [name, bytes] : memory.parts()) result[name] = bytes;
        result["total"] = memory.total();
        return result;
      },
      py::arg("model"), py::arg("first"), py::arg("stage"), py::kw_only(), py::arg("rows"), py::arg("sequence"),
      py::arg("tp") = 1, py::arg("rdp") = 1, py::arg("microbatches") = 1, py::arg("pipeline") = "interleaved",
      py::arg("active_microbatches") = 0, py::arg("accumulates") = false, py::arg("split_sequence") = false,
      py::arg("precision") = "fp32", py::arg("shard_optimizer_state") = false,
      py::arg("activation_checkpointing") = "none");
}

}  // namespace shardsmith::python
