#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <sstream>

#include "base/error.h"
#include "cli/verbs.h"

namespace shardsmith::cli {
namespace {

namespace fs = std::filesystem;
constexpr const char* kPrefix = "shardsmith-";

// In order of precedence.
std::vector<fs::path> folders() {
  std::vector<fs::path> result;
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (!error) result.push_back(self.parent_path());
  const char* path = std::getenv("PATH");
  std::istringstream parts(path ? path : "");
  for (std::string part; std::getline(parts, part, ':');) {
    if (!part.empty()) result.emplace_back(part);
  }
  return result;
}

bool executable(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error) && access(path.c_str(), X_OK) == 0;
}

}  // namespace

std::vector<std::string> external_verbs() {
  std::set<std::string> found;
  for (const auto& folder : folders()) {
    std::error_code error;
    for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
      const std::string name = it->path().filename().string();
      if (name.rfind(kPrefix, 0) == 0 && executable(it->path())) found.insert(name.substr(std::strlen(kPrefix)));
    }
  }
  return {found.begin(), found.end()};
}

void run_external(const std::string& verb, const std::vector<std::string>& arguments) {
  if (verb.empty() || verb.find('/') != std::string::npos) return;
  for (const auto& folder : folders()) {
    const fs::path program = folder / (kPrefix + verb);
    if (!executable(program)) continue;
    std::string name = program.string();
    std::vector<char*> argv = {name.data()};
    std::vector<std::string> copies = arguments;
    for (auto& argument : copies) argv.push_back(argument.data());
    argv.push_back(nullptr);
    execv(name.c_str(), argv.data());
    fail(ErrorKind::kIo, name, ": can't be executed: ", std::strerror(errno));
  }
}

}  // namespace shardsmith::cli
