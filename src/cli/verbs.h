// The verbs of the `shardsmith` program, one file each. A verb returns its exit code or throws an Error.
#pragma once

#include <string>
#include <vector>

namespace shardsmith::cli {

int run_ls(const std::vector<std::string>& arguments);
int run_inspect(const std::vector<std::string>& arguments);
int run_verify(const std::vector<std::string>& arguments);
int run_export(const std::vector<std::string>& arguments);
int run_plan(const std::vector<std::string>& arguments);

// Verbs that are programs of their own: `shardsmith-VERB`, beside this program or on the PATH.
std::vector<std::string> external_verbs();
// Becomes that program; returns only where there is none.
void run_external(const std::string& verb, const std::vector<std::string>& arguments);

}  // namespace shardsmith::cli
