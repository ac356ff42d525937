#include "cli/command_line.h"

#include <algorithm>
#include <iostream>

#include "base/error.h"

namespace shardsmith::cli {

CommandLine::CommandLine(const std::string& verb, const std::string& description)
    : verb_(verb), app_(description, "shardsmith " + verb) {
  app_.add_flag("--json", output_.json, "One JSON object on stdout; notices on stderr");
  app_.add_flag("-q,--quiet", output_.quiet, "No notices and no progress");
}

bool CommandLine::parse(Arguments arguments) {
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

}  // namespace shardsmith::cli
