#include "cli/weights.h"

#include <string_view>
#include <unordered_set>

#include "base/error.h"

namespace shardsmith::cli {
namespace {

constexpr std::string_view kModel = "model/";

// What a config of an unknown family, or of options that we don't compute, leaves us: nothing, and that is no error
// here.
std::optional<FamilyModel> family_of(const Value& config) {
  if (config.is_none()) return std::nullopt;
  try {
    return describe_model(config);
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kInvalidArgument || e.kind() == ErrorKind::kUnsupported) return std::nullopt;
    throw;
  }
}

bool holds_tensors(const Value& value) {
  const Dict* dict = value.get_if<Dict>();
  if (!dict) return false;
  for (const auto& [key, item] : dict->items) {
    if (item.get_if<TensorRef>()) return true;
  }
  return false;
}

// Only what is named "model/...", without that.
Index model_part(const Index& all) {
  Index part;
  part.format = all.format;
  part.files = all.files;
  for (TensorEntry tensor : all.tensors) {
    if (!tensor.name.starts_with(kModel)) continue;
    tensor.name.erase(0, kModel.size());
    if (tensor.alias_of.starts_with(kModel)) {
      tensor.alias_of.erase(0, kModel.size());
    } else if (!tensor.alias_of.empty()) {
      // A second name of something outside: its elements are taken over.
      if (const TensorEntry* stored = stored_entry(all, tensor)) tensor.slices = stored->slices;
      tensor.alias_of.clear();
    }
    part.tensors.push_back(std::move(tensor));
  }
  part.reindex();
  return part;
}

}  // namespace

Weights weights_of(const Source& source, const Value& config) {
  Weights weights;
  const bool ours = source.format == "partial" || source.format == "full";
  if (source.manifest) weights.config = source.manifest->model_config;
  if (source.format == "hf") weights.config = source.index.values;
  if (weights.config.is_none()) weights.config = config;
  weights.family = family_of(weights.config);
  const Value* model = source.index.values.find("model");
  if (ours || (source.format != "hf" && model && holds_tensors(*model))) {
    weights.index = model_part(source.index);
    weights.logical = source.format == "partial" && weights.family.has_value();
  } else {
    weights.index = source.index;
    weights.index.values = Value();
  }
  return weights;
}

Weights with_hf_names(Weights weights) {
  if (!weights.logical || !weights.family) return weights;
  weights.index = to_hf(weights.index, *weights.family);
  weights.logical = false;
  return weights;
}

Weights with_logical_names(Weights weights, std::vector<std::string>* unexpected) {
  if (weights.logical || !weights.family) return weights;
  weights.index = to_logical(weights.index, *weights.family, unexpected);
  weights.logical = true;
  return weights;
}

Weights with_logical_names(Weights weights, NameReport& report) {
  if (weights.logical || !weights.family) return weights;
  weights.index = to_logical(weights.index, *weights.family, report);
  weights.logical = true;
  return weights;
}

bool has_logical_names(const Index& index, const FamilyModel& model) {
  std::unordered_set<std::string_view> logical, theirs;
  for (const FamilyTensor& tensor : model.tensors) {
    theirs.insert(tensor.hf_name);
    for (const Piece& piece : tensor.pieces) logical.insert(piece.name);
  }
  size_t ours = 0, others = 0;
  for (const TensorEntry& tensor : index.tensors) {
    ours += logical.count(tensor.name);
    others += theirs.count(without_wrappers(tensor.name));
  }
  return ours > others;
}

}  // namespace shardsmith::cli
