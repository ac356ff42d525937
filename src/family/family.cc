#include "family/family.h"

#include <algorithm>
#include <unordered_map>

#include "base/error.h"
#include "family/families.h"

namespace shardsmith {
namespace {

struct Family {
  const char* model_type;
  FamilyModel (*describe)(const Value& config);
};

constexpr Family kFamilies[] = {
    {"gpt2", describe_gpt2},   {"llama", describe_llama},       {"mistral", describe_llama},
    {"qwen2", describe_llama}, {"gpt_neox", describe_gpt_neox}, {"bert", describe_bert},
};

// What smp.DistributedModel makes of a module of no family. No transformers configuration says so.
constexpr Family kAnyModule{"torch_module", describe_torch_module};

// Blocks beyond this are a mistake in a file, not a model.
constexpr int64_t kMostLayers = 10'000;

// The part of `slice` that is the box `part` of its tensor, still in that tensor's coordinates.
Slice cut_out(const Slice& slice, const Box& part, Dtype dtype) {
  Slice result = slice;
  result.box = part;
  for (size_t d = 0; d < part.offset.size(); ++d) {
    const uint64_t bytes =
        static_cast<uint64_t>((part.offset[d] - slice.box.offset[d]) * slice.strides[d] * size_of(dtype));
    (slice.encoding == Encoding::kDeflated ? result.inner : result.offset) += bytes;
  }
  return result;
}

// What a file's name is once wrappers' and the family's prefixes are taken off.
std::string_view bare(std::string_view name, const std::string& prefix) {
  name = without_wrappers(name);
  if (name.starts_with(prefix)) name.remove_prefix(prefix.size());
  return name;
}

bool is_ignored(std::string_view name, const FamilyModel& model) {
  return std::any_of(model.ignored_suffixes.begin(), model.ignored_suffixes.end(),
                     [&](const std::string& suffix) { return name.ends_with(suffix); });
}

std::string place_of(const Index& index, const TensorEntry& tensor) {
  return tensor.slices.empty() ? index.format : index.files[tensor.slices[0].file].path;
}

[[noreturn]] void fail_missing(const Index& index, const std::vector<std::string>& missing, size_t of) {
  const std::string where = index.files.empty() ? index.format : index.files[0].path;
  fail(ErrorKind::kCorrupt, where, ": ", missing.size(), " of the model's ", of, " tensors are missing, the first is '",
       missing[0], "'");
}

void check_shape(const Index& index, const TensorEntry& found, const Shape& expected) {
  if (found.shape == expected) return;
  fail(ErrorKind::kCorrupt, place_of(index, found), ": tensor '", found.name, "' has shape ", to_string(found.shape),
       ", but config.json makes it ", to_string(expected));
}

}  // namespace

std::string_view without_wrappers(std::string_view name) {
  for (bool again = true; again;) {
    again = false;
    for (std::string_view wrapper : {"module.", "_orig_mod."}) {
      if (name.starts_with(wrapper)) name.remove_prefix(wrapper.size()), again = true;
    }
  }
  return name;
}

Box Piece::logical_box(int64_t r) const {
  Box box = whole(shape);
  if (!run) return box;
  box.offset[0] = r * run;
  box.extent[0] = run;
  return box;
}

int64_t FamilyTensor::row_unit() const {
  int64_t unit = 1;
  for (const Piece& piece : pieces) unit = std::max(unit, piece.run ? piece.step : 1);
  return unit;
}

Box Piece::hf_box(int64_t r) const {
  const Shape extent = logical_box(r).extent;
  Box box{offset, Shape(shape.size())};
  for (size_t d = 0; d < shape.size(); ++d) box.extent[static_cast<size_t>(permutation[d])] = extent[d];
  if (run) box.offset[static_cast<size_t>(permutation[0])] += r * step;
  return box;
}

std::vector<std::string> supported_model_types() {
  std::vector<std::string> types;
  for (const Family& family : kFamilies) types.emplace_back(family.model_type);
  return types;
}

namespace {

// Numbers of parameters are added up in many places: so many that 63 bits don't hold them are nonsense.
void check_countable(const FamilyModel& model) {
  constexpr int64_t kMost = int64_t{1} << 58;
  int64_t total = 0;
  for (const FamilyTensor& tensor : model.tensors) {
    const int64_t parameters = volume(tensor.shape);  // throws where that is too many already
    if (parameters > kMost || (total += parameters) > kMost)
      fail(ErrorKind::kCorrupt, "config.json: describes a model of more than 2^58 parameters (", tensor.hf_name, " is ",
           to_string(tensor.shape), ")");
  }
}

}  // namespace

FamilyModel describe_model(const Value& config) {
  if (!config.get_if<Dict>()) fail(ErrorKind::kCorrupt, "config.json: not a JSON object");
  const Value* found = config.find("model_type");
  const std::string* type = found ? found->get_if<std::string>() : nullptr;
  if (type && *type == kAnyModule.model_type) {
    FamilyModel model = kAnyModule.describe(config);
    check_countable(model);
    return model;
  }
  std::string known;
  for (const Family& family : kFamilies) {
    known += (known.empty() ? "" : ", ") + std::string(family.model_type);
    if (!type || *type != family.model_type) continue;
    if (Config(config).find("quantization_config")) {
      fail(ErrorKind::kUnsupported, "config.json: quantized weights (quantization_config) are not supported");
    }
    for (const char* layers : {"n_layer", "num_hidden_layers"}) {
      if (Config(config).find(layers) && Config(config).size(layers) > kMostLayers) {
        fail(ErrorKind::kCorrupt, "config.json: ", layers, " is more than ", kMostLayers);
      }
    }
    FamilyModel model = family.describe(config);
    check_countable(model);
    return model;
  }
  if (!type) fail(ErrorKind::kCorrupt, "config.json: model_type is missing; supported are ", known);
  fail(ErrorKind::kInvalidArgument, "config.json: model_type '", *type, "' is not supported; supported are ", known);
}

namespace {

// What of `slice` lies in `from`, as a slice of `to`, whose dimension d is dimension source[d] of `from`.
void carry(const Slice& slice, const Box& from, const Box& to, const std::vector<int>& source, Dtype dtype,
           std::vector<Slice>& slices) {
  const auto both = intersect(slice.box, from);
  if (!both) return;
  const Slice cut = cut_out(slice, *both, dtype);
  Slice carried = cut;
  for (size_t d = 0; d < source.size(); ++d) {
    const auto s = static_cast<size_t>(source[d]);
    carried.box.offset[d] = cut.box.offset[s] - from.offset[s] + to.offset[d];
    carried.box.extent[d] = cut.box.extent[s];
    carried.strides[d] = cut.strides[s];
  }
  slices.push_back(std::move(carried));
}

std::vector<int> inverse(const std::vector<int>& permutation) {
  std::vector<int> result(permutation.size());
  for (size_t d = 0; d < permutation.size(); ++d) result[static_cast<size_t>(permutation[d])] = static_cast<int>(d);
  return result;
}

}  // namespace

std::vector<TensorEntry> logical_pieces(const TensorEntry& hf, const FamilyTensor& tensor) {
  std::vector<TensorEntry> pieces;
  for (const Piece& piece : tensor.pieces) {
    TensorEntry entry{.name = piece.name, .dtype = hf.dtype, .shape = piece.shape, .slices = {}, .alias_of = {}};
    for (int64_t r = 0; r < piece.runs(); ++r)
      for (const Slice& slice : hf.slices)
        carry(slice, piece.hf_box(r), piece.logical_box(r), piece.permutation, hf.dtype, entry.slices);
    pieces.push_back(std::move(entry));
  }
  return pieces;
}

Index to_logical(const Index& hf, const FamilyModel& model, std::vector<std::string>* unexpected) {
  NameReport report;
  Index result = to_logical(hf, model, report);
  if (!report.missing.empty()) fail_missing(hf, report.missing, model.tensors.size());
  if (unexpected) unexpected->insert(unexpected->end(), report.unexpected.begin(), report.unexpected.end());
  return result;
}

Index to_logical(const Index& hf, const FamilyModel& model, NameReport& report) {
  std::unordered_map<std::string_view, const TensorEntry*> by_name;
  for (const TensorEntry& tensor : hf.tensors) {
    const auto [it, is_new] = by_name.emplace(bare(tensor.name, model.prefix), &tensor);
    if (!is_new) {
      fail(ErrorKind::kCorrupt, place_of(hf, tensor), ": '", it->second->name, "' and '", tensor.name,
           "' are the same tensor of the model");
    }
  }
  const auto take = [&](std::string_view name) -> const TensorEntry* {
    const auto it = by_name.find(name);
    if (it == by_name.end()) return nullptr;
    const TensorEntry* tensor = it->second;
    by_name.erase(it);
    return tensor;
  };

  Index result;
  result.format = hf.format;
  result.files = hf.files;
  for (const FamilyTensor& wanted : model.tensors) {
    const TensorEntry* found = take(bare(wanted.hf_name, model.prefix));
    // Some writers keep a tied tensor under its other name only.
    for (size_t t = 0; !found && wanted.also_last && t < model.tied_names.size(); ++t)
      found = take(model.tied_names[t]);
    for (const std::string& alias : wanted.aliases) {
      const TensorEntry* other = take(bare(alias, model.prefix));
      if (!found) found = other;
    }
    const TensorEntry* stored = found ? stored_entry(hf, *found) : nullptr;
    if (!stored) {
      report.missing.push_back(wanted.hf_name);
      continue;
    }
    if (found->name != wanted.hf_name) report.renamed.emplace_back(found->name, wanted.hf_name);
    check_shape(hf, *stored, wanted.shape);
    for (TensorEntry& piece : logical_pieces(*stored, wanted)) result.tensors.push_back(std::move(piece));
  }
  for (const TensorEntry& tensor : hf.tensors) {  // in the file's order
    const std::string_view name = bare(tensor.name, model.prefix);
    const bool tied = std::find(model.tied_names.begin(), model.tied_names.end(), name) != model.tied_names.end();
    if (by_name.count(name) && !tied && !is_ignored(tensor.name, model)) report.unexpected.push_back(tensor.name);
  }
  result.reindex();
  return result;
}

Index to_hf(const Index& logical, const FamilyModel& model) {
  Index result;
  result.format = logical.format;
  result.files = logical.files;
  std::vector<std::string> missing;
  for (const FamilyTensor& wanted : model.tensors) {
    TensorEntry entry{
        .name = wanted.hf_name, .dtype = Dtype::kF32, .shape = wanted.shape, .slices = {}, .alias_of = {}};
    for (const Piece& piece : wanted.pieces) {
      const TensorEntry* found = logical.find(piece.name);
      if (found) found = stored_entry(logical, *found);
      if (!found) {
        missing.push_back(piece.name);
        continue;
      }
      check_shape(logical, *found, piece.shape);
      if (&piece == &wanted.pieces.front()) entry.dtype = found->dtype;
      if (found->dtype != entry.dtype) {
        fail(ErrorKind::kUnsupported, place_of(logical, *found), ": '", piece.name, "' is ", to_string(found->dtype),
             " but '", wanted.pieces.front().name, "' is ", to_string(entry.dtype), "; both are part of '",
             wanted.hf_name, "', which has one type");
      }
      const std::vector<int> source = inverse(piece.permutation);
      for (const Slice& slice : found->slices)
        for (int64_t r = 0; r < piece.runs(); ++r)
          carry(slice, piece.logical_box(r), piece.hf_box(r), source, found->dtype, entry.slices);
    }
    result.tensors.push_back(std::move(entry));
  }
  if (!missing.empty()) fail_missing(logical, missing, model.tensors.size());
  result.reindex();
  return result;
}

ModelCosts model_costs(const FamilyModel& model, double memory_weight, int64_t sequence) {
  if (!(memory_weight >= 0 && memory_weight <= 1)) {
    fail(ErrorKind::kInvalidArgument, "memory_weight is ", memory_weight, ", expected a number from 0 to 1");
  }
  const ModelDescription& d = model.description;
  const size_t blocks = static_cast<size_t>(d.num_layers), head = blocks + 1;
  ModelCosts result;
  result.parameters.assign(blocks + 2, 0);
  std::vector<double> work(blocks + 2, 0);  // multiply-adds per token
  for (const FamilyTensor& tensor : model.tensors) {
    const size_t place = static_cast<size_t>(tensor.place + 1);
    const int64_t count = volume(tensor.shape);
    result.parameters[place] += count;
    // An embedding is looked up; every other matrix is multiplied by, once a token, or once a sequence.
    const std::string& name = tensor.pieces.front().name;
    const bool once = name.starts_with("pooler.") || name.starts_with("classifier.");
    if (place > 0 && tensor.shape.size() == 2)
      work[place] += static_cast<double>(count) / (once ? static_cast<double>(sequence) : 1.0);
    if (tensor.also_last) {
      result.parameters[head] += count;
      work[head] += static_cast<double>(count);
    }
  }
  // Scores and weighted sum, each heads x head size for every position that a token sees.
  const double seen = d.causal ? (static_cast<double>(sequence) + 1) / 2 : static_cast<double>(sequence);
  const double attention = 2.0 * static_cast<double>(d.num_attention_heads * d.attention_head_size) * seen;
  for (size_t b = 1; b <= blocks; ++b) work[b] += attention;

  double all_parameters = 0, all_work = 0;
  for (size_t p = 0; p < work.size(); ++p) {
    all_parameters += static_cast<double>(result.parameters[p]);
    all_work += work[p];
  }
  const auto cost = [&](size_t p) {
    return memory_weight * static_cast<double>(result.parameters[p]) / all_parameters +
           (1 - memory_weight) * work[p] / all_work;
  };
  result.costs.embedding = cost(0);
  for (size_t b = 1; b <= blocks; ++b) result.costs.blocks.push_back(cost(b));
  result.costs.head = cost(head);
  return result;
}

std::vector<size_t> stage_tensors(const FamilyModel& model, const Partition& partition, int stage) {
  const int last = partition.stages() - 1;
  if (stage < 0 || stage > last || partition.first.back() != model.description.num_layers) {
    fail(ErrorKind::kInvalidArgument, "stage ", stage, " of a partition of ", partition.first.back(), " layers into ",
         partition.stages(), " stages does not fit a model of ", model.description.num_layers, " layers");
  }
  const int begin = partition.first[static_cast<size_t>(stage)], end = partition.first[static_cast<size_t>(stage) + 1];
  std::vector<size_t> result;
  for (size_t i = 0; i < model.tensors.size(); ++i) {
    const FamilyTensor& tensor = model.tensors[i];
    const bool on_first = tensor.place < 0 && stage == 0;
    const bool on_last = (tensor.place == model.description.num_layers || tensor.also_last) && stage == last;
    if (on_first || on_last || (tensor.place >= begin && tensor.place < end)) result.push_back(i);
  }
  return result;
}

}  // namespace shardsmith
