// A verb's command line: CLI11 with our habits (both `-` and `_` in long options, --json and -q everywhere,
// one line for a mistake, with the nearest option's name).
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cli/output.h"

namespace shardsmith::cli {

using Arguments = std::vector<std::string>;  // what follows the verb

class CommandLine {
 public:
  CommandLine(const std::string& verb, const std::string& description);

  CLI::App& app() { return app_; }
  const Output& output() const { return output_; }
  // False where help was asked for, and printed. Throws kInvalidArgument for a mistake.
  bool parse(Arguments arguments);

 private:
  void check_options(const Arguments& arguments) const;

  std::string verb_;
  CLI::App app_;
  Output output_;
};

}  // namespace shardsmith::cli
