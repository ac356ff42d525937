#include "family/infer.h"

#include <algorithm>

#include "base/error.h"
#include "family/family.h"

namespace shardsmith {
namespace {

constexpr int64_t kGpt2Head = 64;

const TensorEntry& tensor_of(const Index& weights, const std::string& name, size_t dimensions) {
  for (const char* prefix : {"", "transformer."}) {
    const TensorEntry* found = weights.find(prefix + name);
    if (!found) continue;
    if (found->shape.size() == dimensions) return *found;
    fail(ErrorKind::kCorrupt, weights.format, ": tensor '", found->name, "' has shape ", to_string(found->shape),
         ", expected ", dimensions, " dimensions");
  }
  fail(ErrorKind::kCorrupt, weights.files.empty() ? weights.format : weights.files[0].path, ": no tensor '", name,
       "', so this is no GPT-2");
}

Value infer_gpt2(const Index& weights) {
  const Shape words = tensor_of(weights, "wte.weight", 2).shape;
  const Shape positions = tensor_of(weights, "wpe.weight", 2).shape;
  const Shape inner = tensor_of(weights, "h.0.mlp.c_fc.weight", 2).shape;
  int64_t layers = 0;
  while (weights.find(str("h.", layers, ".ln_1.weight")) || weights.find(str("transformer.h.", layers, ".ln_1.weight")))
    ++layers;
  Value config;
  config.set("model_type", "gpt2");
  config.set("vocab_size", words[0]);
  config.set("n_embd", words[1]);
  config.set("n_positions", positions[0]);
  config.set("n_layer", layers);
  config.set("n_head", std::max<int64_t>(1, words[1] % kGpt2Head == 0 ? words[1] / kGpt2Head : 1));
  config.set("n_inner", inner[1]);
  return config;
}

}  // namespace

Value infer_config(const std::string& model_type, const Index& weights) {
  if (model_type == "gpt2") return infer_gpt2(weights);
  const std::vector<std::string> known = supported_model_types();
  if (std::find(known.begin(), known.end(), model_type) != known.end())
    fail(ErrorKind::kInvalidArgument, "the shapes of a ", model_type,
         " model don't tell its attention heads: name its config.json with --config");
  std::string words;
  for (const std::string& word : known) words += (words.empty() ? "" : ", ") + word;
  fail(ErrorKind::kInvalidArgument, "no family '", model_type, "'; there are ", words);
}

}  // namespace shardsmith
