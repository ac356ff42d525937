// The verbs of the `shardsmith` program, one file each. A verb returns its exit code or throws an Error.
#pragma once

#include <string>
#include <vector>

namespace shardsmith::cli {

struct Verb {
  const char* name;
  const char* summary;
  int (*run)(const std::vector<std::string>&);
  const char* examples = nullptr;  // lines of --help
};
// In the order of the help.
const std::vector<Verb>& all_verbs();
// Null where there is none of that name.
const Verb* find_verb(const std::string& name);
// For those of our other programs that are installed; "" for a foreign one.
const char* external_summary(const std::string& verb);

int run_ls(const std::vector<std::string>& arguments);
int run_inspect(const std::vector<std::string>& arguments);
int run_verify(const std::vector<std::string>& arguments);
int run_diff(const std::vector<std::string>& arguments);
int run_merge(const std::vector<std::string>& arguments);
int run_reshard(const std::vector<std::string>& arguments);
int run_convert(const std::vector<std::string>& arguments);
int run_export(const std::vector<std::string>& arguments);
int run_prune(const std::vector<std::string>& arguments);
int run_plan(const std::vector<std::string>& arguments);
int run_completion(const std::vector<std::string>& arguments);

// Verbs that are programs of their own: `shardsmith-VERB`, beside this program or on the PATH.
std::vector<std::string> external_verbs();
// Becomes that program; returns only where there is none.
void run_external(const std::string& verb, const std::vector<std::string>& arguments);

}  // namespace shardsmith::cli
