// A verb's command line: CLI11 with our habits (both `-` and `_` in long options, --json and -q everywhere,
// one line for a mistake, with the nearest option's name).
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cli/output.h"

namespace shardsmith::cli {

using Arguments = std::vector<std::string>;  // what follows the verb

// One option of a verb, or a positional argument, as completions need it.
struct OptionWords {
  std::vector<std::string> names;  // with their dashes; none: positional
  std::string help;
  bool takes_value = false, repeats = false;
  std::vector<std::string> choices;  // the words that it can be, where there are only a few
};

class CommandLine {
 public:
  CommandLine(const std::string& verb, const std::string& description);

  CLI::App& app() { return app_; }
  const Output& output() const { return output_; }
  // False where help was asked for, and printed. Throws kInvalidArgument for a mistake.
  bool parse(Arguments arguments);

  // What the verb takes, as `run` says by building its command line; nothing is run: parse() returns false.
  static std::vector<OptionWords> words_of(int (*run)(const Arguments&));

 private:
  void check_options(const Arguments& arguments) const;
  std::vector<OptionWords> words() const;

  std::string verb_;
  CLI::App app_;
  Output output_;
};

// Throws kInvalidArgument, with the nearest one, unless `word` is one of `known`: "--to is 'safetensor', it can be
// ...".
void check_choice(const std::string& verb, const std::string& option, const std::string& word,
                  const std::vector<std::string>& known);

// The formats that we write, by the words of --to.
const std::vector<std::string>& format_words();

}  // namespace shardsmith::cli
