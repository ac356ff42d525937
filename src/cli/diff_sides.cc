#include "cli/diff_sides.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "cli/diff_values.h"
#include "cli/weights.h"

namespace shardsmith::cli {
namespace {

// Formats that hold any nested dict, and so the same of the same content.
bool holds_dicts(const std::string& format) {
  return format == "pt" || format == "dcp" || format == "partial" || format == "full";
}

// Whether a source tells its model from what stands beside it.
bool has_sections(const Source& source) {
  const Value* model = source.index.values.find("model");
  return model && model->get_if<Dict>();
}

// Also a file of another format may have our names: it was converted from a checkpoint.
void recognise_logical_names(Weights& weights) {
  if (weights.logical || !weights.family) return;
  std::set<std::string> ours;
  for (const FamilyTensor& tensor : weights.family->tensors) {
    for (const Piece& piece : tensor.pieces) ours.insert(piece.name);
  }
  size_t found = 0;
  for (const TensorEntry& tensor : weights.index.tensors) found += ours.count(tensor.name);
  weights.logical = found > 0 && 2 * found > weights.index.tensors.size();
}

std::string joined(const std::set<std::string>& words) {
  std::string result;
  for (const auto& word : words) result += (result.empty() ? "" : ", ") + word;
  return result;
}

// What a source holds beside its weights, by the first part of its names: {"optimizer", "rng_0"}.
std::set<std::string> beside(const Source& source, const Weights& weights) {
  std::set<std::string> parts;
  // A configuration is part of the form, and so is safetensors' metadata.
  if (source.format == "hf" || source.format == "safetensors") return parts;
  const bool whole = weights.index.tensors.size() == source.index.tensors.size();
  if (!whole) {
    for (const auto& tensor : source.index.tensors) parts.insert(tensor.name.substr(0, tensor.name.find('/')));
  }
  if (const auto* dict = source.index.values.get_if<Dict>()) {
    for (const auto& [key, item] : dict->items) {
      const auto* name = key.get_if<std::string>();
      if (name && !item.get_if<TensorRef>()) parts.insert(*name);
    }
  }
  parts.erase("model");
  return parts;
}

// A side that has Hugging Face's names in one of the forms in which they are found, to the names that `ours` has.
void align(Index& theirs, Index& ours, const FamilyModel& family, std::vector<std::string>& notices) {
  std::string tied_to;
  for (const auto& tensor : family.tensors) {
    if (tensor.also_last) tied_to = tensor.hf_name;
  }
  const auto is_tied = [&](const std::string& name) {
    return std::any_of(family.tied_names.begin(), family.tied_names.end(), [&](const std::string& tied) {
      return name == tied || family.prefix + name == tied || name == family.prefix + tied;
    });
  };
  size_t renamed = 0, ignored = 0;
  std::vector<TensorEntry> ties, kept;
  for (TensorEntry& tensor : theirs.tensors) {
    const std::string longer = family.prefix + tensor.name;
    const bool buffer = std::any_of(family.ignored_suffixes.begin(), family.ignored_suffixes.end(),
                                    [&](const std::string& suffix) { return tensor.name.ends_with(suffix); });
    if (!ours.find(tensor.name)) {
      if (buffer) {
        ++ignored;
        continue;
      }
      if (!family.prefix.empty() && ours.find(longer) && !theirs.find(longer)) {
        tensor.name = longer;
        ++renamed;
      } else if (const TensorEntry* stored = is_tied(tensor.name) ? ours.find(tied_to) : nullptr) {
        // The same elements once more: they are compared with those that they are tied to.
        ties.push_back({tensor.name, stored->dtype, stored->shape, {}, tied_to});
      }
    }
    kept.push_back(tensor);
  }
  theirs.tensors = std::move(kept);
  if (renamed > 0) {
    for (auto& tensor : theirs.tensors) {
      const std::string longer = family.prefix + tensor.alias_of;
      if (!tensor.alias_of.empty() && ours.find(longer)) tensor.alias_of = longer;
    }
    notices.push_back(str(renamed, " names lack the prefix '", family.prefix, "': compared with it"));
  }
  if (ignored > 0) notices.push_back(str(ignored, " known buffers, which no one trains, are left out"));
  theirs.reindex();
  for (auto& tie : ties) ours.tensors.push_back(std::move(tie));
  ours.reindex();
}

void say_what_is_left_out(const Source& a, const Source& b, const Weights& left, const Weights& right, Sides& sides) {
  const auto from = beside(a, left), to = beside(b, right);
  if (from.empty() && to.empty()) return;
  std::string line = "only the weights are compared: ";
  if (!from.empty()) line += "A also holds " + joined(from);
  if (!to.empty()) line += (from.empty() ? "B also holds " : ", B also holds ") + joined(to);
  sides.notices.push_back(std::move(line));
}

}  // namespace

Sides make_sides(const Source& a, const Source& b, bool weights_only) {
  Sides sides;
  const Value config_a = weights_of(a).config, config_b = weights_of(b).config;
  Weights left = weights_of(a, config_b), right = weights_of(b, config_a);
  recognise_logical_names(left);
  recognise_logical_names(right);
  const bool same_names = left.logical == right.logical;
  const bool same_shape = holds_dicts(a.format) && holds_dicts(b.format) && has_sections(a) == has_sections(b);
  sides.ties_may_be_left_out = a.format != b.format;
  if (!weights_only && same_names && (a.format == b.format || same_shape)) {
    sides.a = a.index, sides.b = b.index;
    const bool manifests = a.manifest && b.manifest;
    sides.a_values = comparable_values(a, manifests), sides.b_values = comparable_values(b, manifests);
    sides.values = true;
  } else {
    if (!weights_only) say_what_is_left_out(a, b, left, right, sides);
    if (!same_names) {
      sides.notices.push_back(str(left.logical ? "A" : "B", " is compared under Hugging Face's names"));
      const bool ours_left = left.logical;
      Weights& ours = ours_left ? left : right;
      ours = with_hf_names(std::move(ours));
      align(ours_left ? right.index : left.index, ours.index, *ours.family, sides.notices);
    }
    sides.a = std::move(left.index), sides.b = std::move(right.index);
  }
  sides.a.values = sides.b.values = Value();
  return sides;
}

}  // namespace shardsmith::cli
