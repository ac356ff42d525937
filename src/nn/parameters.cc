#include "nn/parameters.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "family/local_model.h"
#include "family/tensor_parallel.h"
#include "nn/linear_cpu.h"

namespace shardsmith {

namespace {

at::Tensor apply(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool in_out) {
  if (cpu::has_linear(x, weight, bias)) return cpu::linear(x, weight, bias, in_out);
  if (!in_out) return at::linear(x, weight, bias);
  const at::Tensor rows = x.reshape({-1, x.size(-1)});
  const at::Tensor y = bias.defined() ? at::addmm(bias, rows, weight) : at::mm(rows, weight);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(1);
  return y.view(shape);
}

}  // namespace

at::Tensor Linear::operator()(const at::Tensor& x) const { return apply(x, weight, bias, in_out); }

at::Tensor Linear::product(const at::Tensor& x) const { return apply(x, weight, {}, in_out); }

Parameters::Parameters(const FamilyModel& model, std::map<std::string, at::Tensor> held, int rank, int degree) {
  const FamilyModel local = local_model(model, rank, degree);
  const ModelDescription& description = model.description;
  norms_have_bias_ = description.norm == NormKind::kLayerNorm;
  first_row_ = tensor_parallel_box(description, "word_embedding.weight",
                                   {description.vocab_size, description.hidden_size}, rank, degree)
                   .offset[0];
  for (size_t t = 0; t < local.tensors.size(); ++t) {
    const FamilyTensor& tensor = local.tensors[t];
    const auto found = held.find(tensor.hf_name);
    if (found == held.end()) continue;
    const Piece& first = model.tensors[t].pieces.front();
    copies_[tensor.hf_name] = tensor_parallel_copies(description, first.name, first.shape, degree);
    if (found->second.sizes() != at::IntArrayRef(tensor.shape))
      fail(ErrorKind::kInvalidArgument, "parameter '", tensor.hf_name, "' has shape ",
           to_string(Shape(found->second.sizes().begin(), found->second.sizes().end())), ", the model's config says ",
           to_string(tensor.shape), degree > 1 ? str(" for tensor-parallel rank ", rank, " of ", degree) : "");
    for (size_t p = 0; p < tensor.pieces.size(); ++p) {
      const Piece& piece = tensor.pieces[p];
      const bool transposed = piece.permutation == std::vector<int>{1, 0};
      places_[piece.name] = {held_.size(), p, tensor.pieces.size(), transposed, piece.run > 0};
    }
    held_.emplace_back(tensor.hf_name, found->second);
    held.erase(found);
  }
  if (!held.empty())
    fail(ErrorKind::kInvalidArgument, "parameter '", held.begin()->first, "' is not part of a ",
         model.description.model_type, " model");
}

const Parameters::Place* Parameters::find(const std::string& logical) const {
  const auto found = places_.find(logical);
  return found == places_.end() ? nullptr : &found->second;
}

const at::Tensor& Parameters::get(const std::string& logical) const {
  const Place* place = find(logical);
  if (!place) fail(ErrorKind::kInvalidArgument, "this rank needs '", logical, "' and was not given it");
  return held_[place->held].second;
}

Norm Parameters::norm(const std::string& name) const {
  return {get(name + ".weight"), norms_have_bias_ ? get(name + ".bias") : at::Tensor()};
}

std::vector<Linear> Parameters::linears(const std::vector<std::string>& names) const {
  std::vector<Linear> separate;
  bool fused = true;
  for (size_t i = 0; i < names.size(); ++i) {
    const at::Tensor& weight = get(names[i] + ".weight");
    const Place& place = *find(names[i] + ".weight");
    const Place* bias = find(names[i] + ".bias");
    separate.push_back({weight, bias ? held_[bias->held].second : at::Tensor(), place.transposed, place.in_runs});
    fused = fused && place.pieces == names.size() && place.position == i && weight.is_same(separate[0].weight);
  }
  if (fused) return {separate[0]};
  for (size_t i = 0; i < names.size(); ++i)
    if (find(names[i] + ".weight")->pieces != 1)
      fail(ErrorKind::kUnsupported, "'", names[i], "' is a part of a fused tensor that holds other layers too");
  return separate;
}

}  // namespace shardsmith
