// The `shardsmith` program: finds the verb and turns errors into one line and an exit code.
#include <algorithm>
#include <iostream>
#include <new>

#include "base/error.h"
#include "base/value.h"
#include "cli/output.h"
#include "cli/signals.h"
#include "cli/verbs.h"

namespace shardsmith::cli {
namespace {

void print_help(std::ostream& out) {
  out << "Trains transformers split over many processes, and handles their checkpoints.\n\n"
         "Usage: shardsmith VERB [ARGUMENTS...]      (shardsmith VERB --help tells more)\n\n";
  Table table({});
  for (const auto& verb : all_verbs()) table.add({verb.name, verb.summary});
  for (const auto& name : external_verbs()) table.add({name, external_summary(name)});
  out << table.text() << "\n"
      << "Exit codes: 0 done, 1 failed while running, 2 the request is wrong, 3 would not fit, 4 verify or diff\n"
         "found something, 5 no valid checkpoint or model, 130/143 stopped by a signal.\n";
}

[[noreturn]] void unknown_verb(const std::string& word) {
  std::vector<std::string> names = external_verbs();
  for (const auto& verb : all_verbs()) names.push_back(verb.name);
  const std::string near = nearest(word, names);
  fail(ErrorKind::kInvalidArgument, "unknown verb '", word, "'",
       near.empty() ? std::string(" (see: shardsmith --help)") : str("; did you mean '", near, "'?"));
}

int dispatch(const std::vector<std::string>& words) {
  if (words.empty()) {
    print_help(std::cerr);
    return 2;
  }
  const std::string& first = words[0];
  const std::vector<std::string> rest(words.begin() + 1, words.end());
  if (first == "--help" || first == "-h" || first == "help") {
    print_help(std::cout);
    return 0;
  }
  if (first == "--version") {
    std::cout << "shardsmith " << SHARDSMITH_VERSION << "\n";
    return 0;
  }
  if (first.rfind('-', 0) == 0) {
    const std::string near = nearest(first, {"--help", "--version"});
    fail(ErrorKind::kInvalidArgument, "unknown option ", first, " before the verb",
         near.empty() ? std::string(" (see: shardsmith --help)") : str("; did you mean ", near, "?"));
  }
  if (const Verb* verb = find_verb(first)) return verb->run(rest);
  run_external(first, rest);
  unknown_verb(first);
}

int report(ErrorKind kind, int code, const std::string& message, bool json) {
  if (json) {
    Value error;
    error.set("kind", std::string(to_string(kind)));
    error.set("message", message);
    Value object;
    object.set("error", error);
    std::cout << to_json(object, 2) << "\n";
  }
  std::cerr << "shardsmith: error: " << printable(message) << "\n";
  return code;
}

int run(const std::vector<std::string>& words) {
  const bool json = std::find(words.begin(), words.end(), "--json") != words.end();
  try {
    const int code = dispatch(words);
    if (!std::cout.flush()) fail(ErrorKind::kIo, "could not write to stdout");
    return code;
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kInterrupted && stopped_by() != 0)
      return report(e.kind(), 128 + stopped_by(), e.what(), json);
    return report(e.kind(), exit_code(e.kind()), e.what(), json);
  } catch (const std::bad_alloc&) {
    return report(ErrorKind::kIo, 1, "out of memory", json);
  } catch (const std::exception& e) {
    return report(ErrorKind::kIo, 1, e.what(), json);
  }
}

}  // namespace
}  // namespace shardsmith::cli

int main(int argc, char** argv) {
  std::ios::sync_with_stdio(false);
  return shardsmith::cli::run(std::vector<std::string>(argv + 1, argv + argc));
}
