// The extension module shardsmith._engine: converts, releases the interpreter lock, forwards.
#include <ATen/ThreadLocalState.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <optional>

#include "../errors.h"
#include "bindings.h"
#include "comm/group_transport.h"
#include "comm/store_peers.h"
#include "optim/adamw_update.h"
#include "pipeline/stage.h"

namespace py = pybind11;

namespace shardsmith::python {
namespace {

// The caller's thread-local state of torch, for `with`.
class ThreadState {
 public:
  void enter() { guard_.emplace(state_); }
  void exit() { guard_.reset(); }

 private:
  at::ThreadLocalState state_;
  std::optional<at::ThreadLocalStateGuard> guard_;
};

Inputs inputs_of(const std::map<std::string, at::Tensor>& tensors) {
  Inputs inputs;
  for (const auto& [name, tensor] : tensors) {
    if (name == "input_ids")
      inputs.input_ids = tensor;
    else if (name == "attention_mask")
      inputs.attention_mask = tensor;
    else if (name == "position_ids")
      inputs.position_ids = tensor;
    else if (name == "labels")
      inputs.labels = tensor;
    else if (name == "token_type_ids")
      inputs.token_type_ids = tensor;
    else
      fail(ErrorKind::kInvalidArgument,
           "the model takes input_ids, attention_mask, position_ids, token_type_ids and labels, not '", name, "'");
  }
  if (!inputs.input_ids.defined()) fail(ErrorKind::kInvalidArgument, "the model needs input_ids");
  return inputs;
}

BlockSwitches switches_of(const std::map<std::string, double>& given) {
  BlockSwitches switches;
  for (const auto& [name, value] : given) {
    const bool on = value != 0;
    if (name == "attention_in_fp32")
      switches.attention_in_fp32 = on;
    else if (name == "query_key_layer_scaling")
      switches.query_key_layer_scaling = on;
    else if (name == "fp32_residual_addition")
      switches.fp32_residual_addition = on;
    else if (name == "fused_dropout")
      switches.fused_dropout = on;
    else if (name == "fused_softmax")
      switches.fused_softmax = on;
    else if (name == "fused_bias_gelu")
      switches.fused_bias_gelu = on;
    else if (name == "flash_attention")
      switches.flash_attention = on;
    else if (name == "use_alibi")
      switches.use_alibi = on;
    else if (name == "alibi_bias_max")
      switches.alibi_bias_max = value;
    else
      fail(ErrorKind::kInvalidArgument, "a stage has no switch '", name, "'");
  }
  return switches;
}

std::unique_ptr<Stage> make_stage(const std::string& config_json, const std::vector<int>& first, int stage,
                                  std::map<std::string, at::Tensor> parameters,
                                  const std::optional<GroupHandle>& pp_group,
                                  const std::optional<GroupHandle>& rdp_group,
                                  const std::optional<GroupHandle>& tp_group, bool split_sequence, bool prescaled_batch,
                                  double peer_timeout, uint64_t seed, double bucket_cap_mb, const std::string& pipeline,
                                  int active_microbatches, bool shard_optimizer_state,
                                  const std::map<std::string, double>& switches) {
  const FamilyModel model = describe_model(parse_json(config_json, "the model's config"));
  StageOptions options;
  options.partition = Partition{first};
  options.stage = stage;
  options.pipeline = group_of(pp_group, "pipeline group", peer_timeout);
  options.replicas = group_of(rdp_group, "data-parallel group", peer_timeout);
  options.tensor = group_of(tp_group, "tensor-parallel group", peer_timeout);
  options.split_sequence = split_sequence;
  options.prescaled_batch = prescaled_batch;
  options.seed = seed;
  options.bucket_cap_mb = bucket_cap_mb;
  options.schedule = schedule_kind(pipeline);
  options.active_microbatches = active_microbatches;
  options.shard_optimizer_state = shard_optimizer_state;
  options.switches = switches_of(switches);
  const int rank = options.tensor ? options.tensor->rank() : 0, degree = options.tensor ? options.tensor->size() : 1;
  return std::make_unique<Stage>(model, Parameters(model, std::move(parameters), rank, degree), std::move(options));
}

void bind_peers(py::module_& m) {
  py::class_<StorePeers>(m, "StorePeers")
      .def(py::init<c10::intrusive_ptr<c10d::Store>, int, int, std::string>(), py::arg("store"), py::arg("rank"),
           py::arg("size"), py::arg("name"))
      .def(
          "exchange",
          [](StorePeers& self, const py::bytes& message, double seconds) {
            const std::string text = message;
            std::vector<std::string> all;
            {
              py::gil_scoped_release unlocked;
              all = self.exchange(text, milliseconds_of(seconds));
            }
            std::vector<py::bytes> result;
            for (const std::string& one : all) result.emplace_back(one);
            return result;
          },
          py::arg("message"), py::arg("seconds"))
      .def("fail", &StorePeers::fail, py::arg("text"), Unlocked())
      .def(
          "explain",
          [](StorePeers& self, const std::string& text, double seconds) {
            return self.explain(text, milliseconds_of(seconds));
          },
          py::arg("text"), py::arg("seconds"), Unlocked());
}

// (rank, address, bytes)
using Message = std::tuple<int, uintptr_t, uint64_t>;

void bind_transport(py::module_& m) {
  py::class_<GroupTransport>(m, "GroupTransport")
      .def(py::init([](const GroupHandle& group, const std::string& name, double seconds) {
             return std::make_unique<GroupTransport>(Group(group, name, milliseconds_of(seconds)));
           }),
           py::arg("group"), py::arg("name"), py::arg("seconds"))
      .def(
          "move",
          [](GroupTransport& self, const std::vector<Message>& out, const std::vector<Message>& in, double seconds) {
            std::vector<Outgoing> sent;
            std::vector<Incoming> received;
            for (const auto& [rank, address, size] : out)
              sent.push_back({rank, {reinterpret_cast<const std::byte*>(address), static_cast<size_t>(size)}});
            for (const auto& [rank, address, size] : in)
              received.push_back({rank, {reinterpret_cast<std::byte*>(address), static_cast<size_t>(size)}});
            self.move(sent, received, milliseconds_of(seconds));
          },
          py::arg("out"), py::arg("received"), py::arg("seconds"), Unlocked());
}

void bind_stage(py::module_& m) {
  py::class_<Stage> stage(m, "Stage");
  stage
      .def(py::init(&make_stage), py::arg("config_json"), py::arg("first"), py::arg("stage"), py::arg("parameters"),
           py::arg("pp_group") = py::none(), py::arg("rdp_group") = py::none(), py::arg("tp_group") = py::none(),
           py::arg("split_sequence") = false, py::arg("prescaled_batch") = true, py::arg("peer_timeout") = 300.0,
           py::arg("seed") = 0, py::arg("bucket_cap_mb") = 25.0, py::arg("pipeline") = "interleaved",
           py::arg("active_microbatches") = 0, py::arg("shard_optimizer_state") = false,
           py::arg("switches") = std::map<std::string, double>{})
      .def(
          "set_activation_checkpointing",
          [](Stage& self, const std::vector<std::tuple<int64_t, bool, bool>>& layers) {
            std::vector<ActivationCheckpoint> checkpoints;
            for (const auto& [segment, attention, output] : layers) checkpoints.push_back({segment, attention, output});
            self.set_activation_checkpointing(checkpoints);
          },
          py::arg("layers"))
      .def("set_seed", &Stage::set_seed, py::arg("seed"))
      .def(
          "begin_step",
          [](Stage& self, uint64_t step, int microbatches, bool training, bool dropout, uint64_t first_sample,
             uint64_t rank_samples, bool reduce, double loss_scale) {
            self.begin_step({step, microbatches, training, dropout, first_sample, rank_samples, reduce, loss_scale});
          },
          py::arg("step"), py::arg("microbatches"), py::arg("training"), py::arg("dropout"),
          py::arg("first_sample") = 0, py::arg("rank_samples") = 0, py::arg("reduce") = true,
          py::arg("loss_scale") = 1.0, Unlocked())
      .def(
          "forward",
          [](Stage& self, int microbatch, const std::map<std::string, at::Tensor>& tensors) {
            std::map<std::string, at::Tensor> result;
            const at::Tensor loss = self.forward(microbatch, inputs_of(tensors));
            if (loss.defined()) result["loss"] = loss;
            return result;
          },
          py::arg("microbatch"), py::arg("inputs"), Unlocked())
      .def("output", &Stage::output, py::arg("microbatch"), Unlocked())
      .def("pooled", &Stage::pooled, py::arg("microbatch"), Unlocked())
      .def(
          "backward",
          [](Stage& self, int microbatch, const std::optional<at::Tensor>& loss, double scale) {
            self.backward(microbatch, loss.value_or(at::Tensor()), scale);
          },
          py::arg("microbatch"), py::arg("loss"), py::arg("scale"), Unlocked())
      .def("finish_microbatch", &Stage::finish_microbatch, py::arg("microbatch"), Unlocked())
      .def("abort", &Stage::abort, py::arg("text"), Unlocked())
      .def("broadcast", &Stage::broadcast, py::arg("tensors"), py::arg("root"), Unlocked());
  bind_gradients(stage);
}

void bind_optimizer(py::module_& m) {
  m.def(
      "adamw_update",
      [](const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& masters,
         const std::vector<at::Tensor>& averages, const std::vector<at::Tensor>& squares,
         const std::vector<std::optional<at::Tensor>>& rounded, const std::vector<double>& steps, double lr,
         double beta1, double beta2, double epsilon, double weight_decay, double gradient_scale) {
        std::vector<AdamWTensors> tensors;
        for (size_t i = 0; i < gradients.size(); ++i)
          tensors.push_back({gradients[i], masters.at(i), averages.at(i), squares.at(i),
                             rounded.at(i).value_or(at::Tensor()), steps.at(i)});
        adamw_update(tensors, {lr, beta1, beta2, epsilon, weight_decay, gradient_scale});
      },
      py::arg("gradients"), py::arg("masters"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"), py::arg("rounded"),
      py::arg("steps"), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("epsilon"),
      py::arg("weight_decay"), py::arg("gradient_scale") = 1.0, Unlocked());
}

}  // namespace

PYBIND11_MODULE(_engine, m) {
  m.doc() = "The half of Shardsmith that stands on libtorch. See _engine.pyi.";
  py::module_::import("torch");
  register_errors();
  bind_peers(m);
  bind_transport(m);
  bind_stage(m);
  bind_optimizer(m);
  bind_layers(m);
  bind_module_stage(m);
  py::class_<ThreadState>(m, "ThreadState")
      .def(py::init<>())
      .def(
          "__enter__",
          [](ThreadState& self) -> ThreadState& {
            self.enter();
            return self;
          },
          py::return_value_policy::reference)
      .def("__exit__", [](ThreadState& self, const py::args&) { self.exit(); });
}

}  // namespace shardsmith::python
