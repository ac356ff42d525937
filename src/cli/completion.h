// Scripts that let a shell complete verbs, options, their words and files, made from the verbs' own command lines.
#pragma once

#include <string>
#include <vector>

#include "cli/command_line.h"

namespace shardsmith::cli {

struct VerbWords {
  std::string name, summary;
  std::vector<OptionWords> options;  // and positional arguments
};

std::string bash_completion(const std::vector<VerbWords>& verbs);
std::string zsh_completion(const std::vector<VerbWords>& verbs);
std::string fish_completion(const std::vector<VerbWords>& verbs);

}  // namespace shardsmith::cli
