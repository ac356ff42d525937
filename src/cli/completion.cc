#include "cli/completion.h"

#include <algorithm>
#include <iostream>

#include "base/error.h"
#include "cli/verbs.h"

namespace shardsmith::cli {
namespace {

std::string joined(const std::vector<std::string>& words) {
  std::string result;
  for (const auto& word : words) result += (result.empty() ? "" : " ") + word;
  return result;
}

std::string replaced(std::string text, const std::string& what, const std::string& with) {
  for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += with.size()) {
    text.replace(at, what.size(), with);
  }
  return text;
}

// Within single quotes of a POSIX shell.
std::string quoted(const std::string& text) { return "'" + replaced(text, "'", "'\\''") + "'"; }

// The options' help has one line a shell can show.
std::string one_line(const std::string& text) { return replaced(text, "\n", " "); }

std::string names_of(const std::vector<VerbWords>& verbs) {
  std::vector<std::string> names;
  for (const auto& verb : verbs) names.push_back(verb.name);
  return joined(names);
}

bool is_option(const OptionWords& words) { return !words.names.empty(); }

// Words that a positional argument can be.
std::vector<std::string> positional_choices(const VerbWords& verb) {
  for (const auto& words : verb.options) {
    if (!is_option(words) && !words.choices.empty()) return words.choices;
  }
  return {};
}

std::vector<VerbWords> known_verbs() {
  std::vector<VerbWords> verbs;
  for (const Verb& verb : all_verbs()) verbs.push_back({verb.name, verb.summary, CommandLine::words_of(verb.run)});
  for (const auto& name : external_verbs()) {
    if (!find_verb(name)) verbs.push_back({name, external_summary(name), {}});
  }
  return verbs;
}

}  // namespace

std::string bash_completion(const std::vector<VerbWords>& verbs) {
  std::string options, choices, arguments;
  for (const auto& verb : verbs) {
    std::vector<std::string> names;
    for (const auto& words : verb.options) {
      names.insert(names.end(), words.names.begin(), words.names.end());
      for (const auto& name : words.names) {
        if (words.takes_value && !words.choices.empty())
          choices += str("    ", quoted(verb.name + " " + name), ") words=", quoted(joined(words.choices)), " ;;\n");
      }
    }
    if (!names.empty()) options += str("    ", verb.name, ") words=", quoted(joined(names)), " ;;\n");
    if (const auto words = positional_choices(verb); !words.empty())
      arguments += str("    ", verb.name, ") words=", quoted(joined(words)), " ;;\n");
  }
  return str(R"(# bash completion of shardsmith; made by `shardsmith completion bash`.
_shardsmith() {
  local cur="${COMP_WORDS[COMP_CWORD]}" verb="${COMP_WORDS[1]}" before="" words=""
  ((COMP_CWORD > 1)) && before="${COMP_WORDS[COMP_CWORD - 1]}"
  if [[ $cur == = ]]; then
    cur=""
  elif [[ $before == = ]]; then
    before="${COMP_WORDS[COMP_CWORD - 2]}"
  fi
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    mapfile -t COMPREPLY < <(compgen -W )",
             quoted(names_of(verbs) + " --help --version"), R"( -- "$cur")
    return
  fi
  case "$verb $before" in
)",
             choices, R"(  esac
  if [[ -z $words && $cur == -* ]]; then
    case "$verb" in
)",
             options, R"(    esac
    words+=" --help"
  fi
  if [[ -z $words ]]; then
    case "$verb" in
)",
             arguments, R"(      *) ;;
    esac
  fi
  if [[ -n $words ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
  else
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
  fi
}
complete -o filenames -o bashdefault -F _shardsmith shardsmith
)");
}

std::string zsh_completion(const std::vector<VerbWords>& verbs) {
  // Brackets and colons mean something in what _arguments and _describe read.
  const auto described = [](const std::string& text) {
    return replaced(replaced(replaced(replaced(one_line(text), "\\", "\\\\"), "[", "("), "]", ")"), ":", "\\:");
  };
  std::string list, cases;
  for (const auto& verb : verbs) {
    list += str("    ", quoted(verb.name + ":" + described(verb.summary)), "\n");
    if (verb.options.empty()) continue;
    cases += str("    ", verb.name, ")\n      _arguments \\\n");
    for (const auto& words : verb.options) {
      for (const auto& name : words.names) {
        std::string spec = (words.repeats ? "*" : "") + name + "[" + described(words.help) + "]";
        if (words.takes_value)
          spec += words.choices.empty() ? ":value:_files" : ":value:(" + joined(words.choices) + ")";
        cases += str("        ", quoted(spec), " \\\n");
      }
    }
    const auto choices = positional_choices(verb);
    cases +=
        str("        ", quoted(choices.empty() ? "*:file:_files" : "*:word:(" + joined(choices) + ")"), "\n      ;;\n");
  }
  return str(R"(#compdef shardsmith
# zsh completion of shardsmith; made by `shardsmith completion zsh`.
_shardsmith() {
  local -a verbs
  verbs=(
)",
             list, R"(  )
  if ((CURRENT == 2)); then
    _describe verb verbs
    return
  fi
  shift words
  ((CURRENT--))
  case "$words[1]" in
)",
             cases, R"(    *) _files ;;
  esac
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _shardsmith "$@"
else
  compdef _shardsmith shardsmith
fi
)");
}

std::string fish_completion(const std::vector<VerbWords>& verbs) {
  // In fish's single quotes a backslash escapes itself and the quote.
  const auto fish = [](const std::string& text) {
    return "'" + replaced(replaced(one_line(text), "\\", "\\\\"), "'", "\\'") + "'";
  };
  std::string text = "# fish completion of shardsmith; made by `shardsmith completion fish`.\n";
  for (const auto& verb : verbs) {
    text += str("complete -c shardsmith -n __fish_use_subcommand -f -a ", verb.name, " -d ", fish(verb.summary), "\n");
  }
  for (const auto& verb : verbs) {
    const std::string when = str("complete -c shardsmith -n '__fish_seen_subcommand_from ", verb.name, "'");
    for (const auto& words : verb.options) {
      if (!is_option(words)) continue;
      std::string names;
      for (const auto& name : words.names) {
        names += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      }
      std::string value;
      if (words.takes_value) value = words.choices.empty() ? " -r" : " -x -a " + fish(joined(words.choices));
      text += str(when, names, value, " -d ", fish(words.help), "\n");
    }
    if (const auto choices = positional_choices(verb); !choices.empty())
      text += str(when, " -f -a ", fish(joined(choices)), "\n");
  }
  return text;
}

int run_completion(const Arguments& arguments) {
  CommandLine line(
      "completion",
      "Prints a script with which a shell completes verbs, options and files; save it where the shell looks for\n"
      "completions, or source it.");
  std::string shell;
  line.app().add_option("SHELL", shell, "bash, zsh or fish")->required()->type_name("TEXT:{bash,zsh,fish}");
  if (!line.parse(arguments)) return 0;
  check_choice("completion", "SHELL", shell, {"bash", "zsh", "fish"});
  const auto verbs = known_verbs();
  std::cout << (shell == "bash"  ? bash_completion(verbs)
                : shell == "zsh" ? zsh_completion(verbs)
                                 : fish_completion(verbs));
  return 0;
}

}  // namespace shardsmith::cli
