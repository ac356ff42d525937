#include "cli/command_line.h"

#include <algorithm>
#include <iostream>

#include "base/error.h"
#include "cli/verbs.h"
#include "family/family.h"

namespace shardsmith::cli {
namespace {

// Where words_of() wants them.
thread_local std::vector<OptionWords>* noted = nullptr;

// "TEXT:{a,b}" -> {"a", "b"}: how CLI11 spells the words of IsMember.
std::vector<std::string> members(const std::string& type) {
  std::vector<std::string> words;
  const size_t begin = type.find(":{"), end = type.rfind('}');
  if (begin == std::string::npos || end == std::string::npos) return words;
  std::string word;
  for (const char c : type.substr(begin + 2, end - begin - 2)) {
    if (c != ',') {
      word += c;
    } else {
      words.push_back(std::move(word));
      word.clear();
    }
  }
  words.push_back(word);
  return words;
}

// Options that mean the same in every verb.
std::vector<std::string> choices_of(const std::string& verb, const CLI::Option& option) {
  for (const auto& name : option.get_lnames()) {
    if (name == "to" && verb == "merge") return {"pt", "safetensors", "full"};
    if (name == "to") return format_words();
    if (name == "dtype") return {"float32", "float16", "bfloat16", "float64"};
    if (name == "family") return supported_model_types();
    if (name == "names") return {"hf", "logical"};
    if (name == "placement-strategy") return {"cluster", "spread"};
  }
  return members(option.get_type_name());
}

}  // namespace

CommandLine::CommandLine(const std::string& verb, const std::string& description)
    : verb_(verb), app_(description, "shardsmith " + verb) {
  app_.add_flag("--json", output_.json, "One JSON object on stdout; notices on stderr");
  app_.add_flag("-q,--quiet", output_.quiet, "No notices and no progress");
  if (const Verb* known = find_verb(verb); known && known->examples) app_.footer(str("Examples:\n", known->examples));
}

bool CommandLine::parse(Arguments arguments) {
  if (noted) {
    *noted = words();
    return false;
  }
  for (auto& argument : arguments) {
    if (argument == "--") break;
    if (argument.rfind("--", 0) != 0) continue;
    std::replace(argument.begin(),
                 argument.begin() + static_cast<ptrdiff_t>(std::min(argument.find('='), argument.size())), '_', '-');
  }
  check_options(arguments);
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
  try {
    app_.parse(arguments);
  } catch (const CLI::CallForHelp&) {
    std::cout << app_.help();
    return false;
  } catch (const CLI::ParseError& e) {
    std::string text = e.what();
    std::replace(text.begin(), text.end(), '\n', ' ');
    fail(ErrorKind::kInvalidArgument, verb_, ": ", text, " (see: shardsmith ", verb_, " --help)");
  }
  return true;
}

std::vector<OptionWords> CommandLine::words_of(int (*run)(const Arguments&)) {
  std::vector<OptionWords> words;
  noted = &words;
  run({});
  noted = nullptr;
  return words;
}

std::vector<OptionWords> CommandLine::words() const {
  std::vector<OptionWords> all;
  for (const CLI::Option* option : app_.get_options()) {
    OptionWords words;
    if (!option->get_positional()) {
      for (const auto& name : option->get_snames()) words.names.push_back("-" + name);
      for (const auto& name : option->get_lnames()) words.names.push_back("--" + name);
    }
    words.help = option->get_description();
    words.takes_value = option->get_expected_max() > 0;
    words.repeats = option->get_items_expected_max() > 1;
    words.choices = choices_of(verb_, *option);
    all.push_back(std::move(words));
  }
  return all;
}

// CLI11 says only that something was not expected.
void CommandLine::check_options(const Arguments& arguments) const {
  std::vector<std::string> known;
  for (const CLI::Option* option : app_.get_options()) {
    for (const auto& name : option->get_lnames()) known.push_back("--" + name);
  }
  for (const auto& argument : arguments) {
    if (argument == "--") break;
    if (argument.rfind("--", 0) != 0) continue;
    const std::string name = argument.substr(0, argument.find('='));
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string near = nearest(name, known);
    fail(ErrorKind::kInvalidArgument, verb_, ": unknown option ", name,
         near.empty() ? str(" (see: shardsmith ", verb_, " --help)") : str("; did you mean ", near, "?"));
  }
}

void check_choice(const std::string& verb, const std::string& option, const std::string& word,
                  const std::vector<std::string>& known) {
  if (std::find(known.begin(), known.end(), word) != known.end()) return;
  std::string all;
  for (size_t i = 0; i < known.size(); ++i) all += (i == 0 ? "" : i + 1 == known.size() ? " or " : ", ") + known[i];
  const std::string near = nearest(word, known);
  fail(ErrorKind::kInvalidArgument, verb, ": ", option, " is '", word, "', it can be ", all,
       near.empty() ? std::string() : str("; did you mean ", near, "?"));
}

const std::vector<std::string>& format_words() {
  static const std::vector<std::string> words{"pt", "safetensors", "hf", "dcp", "partial", "full"};
  return words;
}

}  // namespace shardsmith::cli
