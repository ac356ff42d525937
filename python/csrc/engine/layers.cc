// The engine's functions for layers that stand alone: what smp.nn is made of.
#include "base/error.h"
#include "bindings.h"
#include "family/families.h"
#include "nn/attention.h"
#include "nn/dropout.h"
#include "nn/embedding.h"
#include "nn/functional.h"
#include "nn/linear_cpu.h"
#include "nn/loss.h"
#include "nn/parameters.h"
#include "nn/tensor_parallel.h"

namespace py = pybind11;

namespace shardsmith::python {
namespace {

using Optional = std::optional<at::Tensor>;

// The places of dropout masks, from Python: (active, seed, step, first sample).
using Place = std::tuple<bool, uint64_t, uint64_t, uint64_t>;

DropoutContext context_of(const Place& place) {
  const auto& [active, seed, step, first] = place;
  return {active, seed, step, first};
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const Optional& bias) {
  return Linear{weight, bias.value_or(at::Tensor())}(x);
}

// activation(linear(x)), in one pass where `fused` and there is a kernel for it.
at::Tensor linear_activation(const at::Tensor& x, const at::Tensor& weight, const Optional& bias,
                             const std::string& activation, bool fused) {
  const Activation kind = activation_from(activation);
  const at::Tensor b = bias.value_or(at::Tensor());
  if (fused && kind == Activation::kGeluTanh && cpu::has_linear(x, weight, b))
    return cpu::linear_gelu(x, weight, b, false);
  if (fused) return activate(Linear{weight, b}(x), kind);
  const at::Tensor y = at::linear(x, weight);
  return activate(b.defined() ? y + b : y, kind);
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Optional& mask, bool causal,
                  double scale, const Optional& slopes, double probability, uint64_t site, int64_t first_head,
                  const Place& place, bool flash, bool fused_softmax, bool in_fp32, int64_t query_key_layer) {
  AttentionOptions options;
  options.causal = causal;
  options.scale = scale;
  options.slopes = slopes.value_or(at::Tensor());
  options.dropout = probability;
  options.site = site;
  options.first_head = first_head;
  options.switches = {flash, fused_softmax, in_fp32, query_key_layer};
  return attention(q, k, v, mask.value_or(at::Tensor()), options, context_of(place));
}

at::Tensor loss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels, const Optional& bias,
                bool shifted, const TensorParallel* ranks, int64_t first_row, int64_t vocab_size, int64_t parts) {
  LossOptions options;
  if (ranks && ranks->size() > 1) options.ranks = ranks;
  options.first_row = first_row;
  options.vocab_size = vocab_size;
  options.parts = parts;
  if (shifted) return causal_lm_loss(hidden, weight, labels, options);
  return linear_cross_entropy(hidden, weight, bias.value_or(at::Tensor()), labels, options);
}

}  // namespace

void bind_layers(py::module_& m) {
  py::class_<TensorParallel>(m, "TensorParallel")
      .def(py::init([](const std::optional<GroupHandle>& group, double timeout) {
             return std::make_unique<TensorParallel>(group_of(group, "tensor-parallel group", timeout), false);
           }),
           py::arg("group") = py::none(), py::arg("peer_timeout") = 300.0)
      .def_property_readonly("rank", &TensorParallel::rank)
      .def_property_readonly("size", &TensorParallel::size)
      .def(
          "enter", [](const TensorParallel& self, const at::Tensor& x) { return self.enter(x, x.size(1)); },
          py::arg("x"), Unlocked())
      .def("leave", &TensorParallel::leave, py::arg("x"), Unlocked())
      .def("gather_columns", &TensorParallel::gather_columns, py::arg("x"), py::arg("total"), Unlocked())
      .def("gather_rows", &TensorParallel::gather_rows, py::arg("x"), Unlocked())
      .def("own_rows", &TensorParallel::own_rows, py::arg("x"), Unlocked());

  m.def(
      "layer_norm",
      [](const at::Tensor& x, const at::Tensor& weight, const Optional& bias, double epsilon) {
        return normalize(x, weight, bias.value_or(at::Tensor()), NormKind::kLayerNorm, epsilon);
      },
      py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("epsilon"), Unlocked());
  m.def("linear", &linear, py::arg("x"), py::arg("weight"), py::arg("bias") = py::none(), Unlocked());
  m.def("linear_activation", &linear_activation, py::arg("x"), py::arg("weight"), py::arg("bias"),
        py::arg("activation"), py::arg("fused"), Unlocked());
  m.def(
      "dropout",
      [](const at::Tensor& x, double p, uint64_t site, const Place& place) {
        return dropout(x, p, site, context_of(place));
      },
      py::arg("x"), py::arg("p"), py::arg("site"), py::arg("place"), Unlocked());
  m.def(
      "dropout_add",
      [](const at::Tensor& x, const Optional& bias, const at::Tensor& residual, double p, uint64_t site,
         const Place& place) {
        return dropout_add(x, bias.value_or(at::Tensor()), residual, p, site, context_of(place));
      },
      py::arg("x"), py::arg("bias"), py::arg("residual"), py::arg("p"), py::arg("site"), py::arg("place"), Unlocked());
  m.def("attention", &attend, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("mask"), py::kw_only(),
        py::arg("causal"), py::arg("scale"), py::arg("slopes") = py::none(), py::arg("dropout") = 0.0,
        py::arg("site") = 0, py::arg("first_head") = 0, py::arg("place") = Place{}, py::arg("flash") = true,
        py::arg("fused_softmax") = true, py::arg("in_fp32") = false, py::arg("query_key_layer") = 0, Unlocked());
  m.def("alibi_slopes", &alibi_slopes, py::arg("heads"), py::arg("bias_max"), py::arg("first"), py::arg("count"));
  m.def("lm_loss", &loss, py::arg("hidden"), py::arg("weight"), py::arg("labels"), py::arg("bias") = py::none(),
        py::kw_only(), py::arg("shifted"), py::arg("ranks") = nullptr, py::arg("first_row") = 0,
        py::arg("vocab_size") = 0, py::arg("parts") = 1, Unlocked());
}

}  // namespace shardsmith::python
