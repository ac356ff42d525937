// A configuration from the tensors alone, for weights that come without a config.json.
#pragma once

#include <string>

#include "base/value.h"
#include "layout/index.h"

namespace shardsmith {

// What of Hugging Face's config.json can be told from names and shapes. Attention heads of GPT-2 are taken to be 64
// wide, as all published ones are; they matter to tensor parallelism only. Throws kInvalidArgument for a family whose
// shapes don't say enough (it needs its config.json), kCorrupt where a tensor is missing.
Value infer_config(const std::string& model_type, const Index& weights);

}  // namespace shardsmith
