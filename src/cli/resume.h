// Anything readable as what a training run goes on from: under the names of a partial checkpoint, whatever wrote it.
#pragma once

#include <string>
#include <vector>

#include "cli/source.h"
#include "family/family.h"
#include "layout/index.h"

namespace shardsmith::cli {

struct ResumeSource {
  std::string format;  // as Source::format
  // Tensors "model/{logical name}", "optimizer/state/{logical name}/{exp_avg}", and under "values/" those of the rest.
  // Values: "optimizer", a list of one as read_partial() has it, where there is one that goes with the model's
  // parameters; "content", what else stood beside the model; "step", of a full checkpoint of ours.
  Index index;
  NameReport names;
  std::vector<std::string> left_out;  // of the optimizer, in one line each
};

// Of a dict that holds the model under "model", "model_state_dict" or "state_dict" (and so on, as training scripts save
// it), that is the model. Names may be Hugging Face's, wrappers' prefixes before them, or ours. A tensor of the model
// that isn't there is told in `names`; one of another shape is kCorrupt.
// Optimizer state may be by name, or by position as torch saves it: `parameters` then are the Hugging Face names of
// the optimizer's parameters, in the order of its groups (empty: nobody knows, and such state is left out).
// kInvalidArgument where their number or shapes say that it is the state of another optimizer.
ResumeSource open_for_resume(Storage& storage, const std::string& path, const FamilyModel& model,
                             const std::vector<std::string>& parameters);

}  // namespace shardsmith::cli
