// What is to be written, whatever the target: a source's tensors and values, taken apart into what they are for.
//
// A tensor stands once in `index`, under the name of its first place; ties are several TensorRefs of one number.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/value.h"
#include "cli/source.h"
#include "family/family.h"
#include "layout/index.h"

namespace shardsmith::cli {

enum class Names {
  kAsTheyAre,
  kHuggingFace,  // where the family is known; else as they are
  kLogical,      // likewise
};

struct ContentOptions {
  Names names = Names::kAsTheyAre;
  bool weights_only = false;
  Value config;                               // a config.json for sources that have none
  std::vector<std::string> include, exclude;  // globs over the model's tensor names as they will be written
  const FamilyModel* family = nullptr;        // stands in for what the source's config says
  NameReport* report = nullptr;               // kLogical: gets what became of the names, and none is then an error
};

struct Content {
  Index index;      // tensors and the files they lie in; no values
  Value model;      // TensorRef counts in index.tensors, here and below
  Value optimizer;  // {"class", "state": {parameter: {"exp_avg": tensor, ...}}, "param_groups"}; None if there is none
  Dict beside;      // by name: "user_content", "rng_0", ...
  bool sections = false;  // the source told these apart; else all of it is `model`
  bool logical = false;   // the model's names are ours

  Value config;                       // of Hugging Face; None where nobody knows it
  std::optional<FamilyModel> family;  // nothing where there is no config, or of no known family
  std::optional<Manifest> manifest;   // of a checkpoint of ours
  std::string companions;             // a folder with tokenizer and the like; "" where there is none
  std::vector<std::string> left_out;  // what options asked not to take, and names that no family knows
};

Content content_of(Storage& storage, const std::string& path, Source source, const ContentOptions& options);

// The model's tensors by flat name, in order; several names of one number are ties. Values that are no tensors are
// counted in `plain` (their first path in `first_plain`).
struct NamedTensor {
  std::string name;
  size_t tensor = 0;
};
std::vector<NamedTensor> flat_names(const Value& tree, size_t* plain = nullptr, std::string* first_plain = nullptr);

// fnmatch's globs, `*` across dots and slashes too.
bool matches(const std::vector<std::string>& globs, const std::string& name);

}  // namespace shardsmith::cli
