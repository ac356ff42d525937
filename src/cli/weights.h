// The model's weights of anything readable, without what stands beside them (optimizer, user content, random state).
#pragma once

#include <optional>
#include <string>

#include "base/value.h"
#include "cli/source.h"
#include "family/family.h"
#include "layout/index.h"

namespace shardsmith::cli {

struct Weights {
  Index index;                        // tensors under their names; no values
  Value config;                       // Hugging Face's config.json; None where nobody knows it
  std::optional<FamilyModel> family;  // nothing where the config is not there or of no known family
  bool logical = false;               // the names are ours (family.h); otherwise as they stand in the files
};

// Of a partial or full checkpoint the part under "model/", of any other thing all of it, except that of a dict with an
// entry "model" that is one, as training scripts save it, that entry is taken. `config` stands in where the source has
// none.
Weights weights_of(const Source& source, const Value& config = Value());

// The same weights under Hugging Face's names, ties once; as they are where the names are not ours or no family is
// known.
Weights with_hf_names(Weights weights);

// The same weights under our names. Where no family is known they stay as they are. Throws kCorrupt where a tensor of
// the family is missing or has another shape; those that are not the family's are listed in `unexpected`.
Weights with_logical_names(Weights weights, std::vector<std::string>* unexpected = nullptr);

// The same, with what became of the names; a missing tensor is told and no error.
Weights with_logical_names(Weights weights, NameReport& report);

// Whether more of an index's names are ours than Hugging Face's.
bool has_logical_names(const Index& index, const FamilyModel& model);

}  // namespace shardsmith::cli
