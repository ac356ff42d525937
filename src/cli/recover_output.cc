// What a verb that died has left beside its target.
#include <signal.h>

#include <cerrno>

#include "base/error.h"
#include "checkpoint/commit.h"
#include "checkpoint/full.h"
#include "cli/staged_output.h"

namespace shardsmith::cli {
namespace {

// The process of ".{name}.tmp-{pid}"; 0 for another name. A save's id has more digits.
int process_of(const std::string& entry, const std::string& name) {
  const std::string before = "." + name + ".tmp-";
  if (!entry.starts_with(before)) return 0;
  const std::string number = entry.substr(before.size());
  if (number.empty() || number.size() > 9 || number.find_first_not_of("0123456789") != std::string::npos) return 0;
  return std::stoi(number);
}

bool is_gone(int process) { return ::kill(process, 0) != 0 && errno == ESRCH; }

struct Left {
  std::vector<std::string> outputs;  // .{name}.tmp-{pid}
  std::vector<std::string> begun;    // ..{name}.tmp-{pid}.tmp-{pid}-{n}: files that were not whole yet
};

Left left_at(Storage& storage, const std::string& target) {
  Left left;
  for (const std::string& entry : storage.list(parent(target))) {
    const std::string path = join(parent(target), entry);
    const size_t inner = entry.rfind(".tmp-");
    if (const int process = process_of(entry, base_name(target)); process > 0) {
      if (is_gone(process)) left.outputs.push_back(path);
    } else if (entry.starts_with("..") && inner != std::string::npos) {
      const int writer = process_of(entry.substr(1, inner - 1), base_name(target));
      if (writer > 0 && is_gone(writer) && entry.substr(inner).starts_with(str(".tmp-", writer, "-")))
        left.begun.push_back(path);
    }
  }
  return left;
}

}  // namespace

std::string recover_output(Storage& storage, const std::string& target) {
  const std::string folder = parent(target);
  if (!storage.stat(folder).is_directory) return "";
  bool undone = recover_full(storage, target);
  const Left left = left_at(storage, target);
  const std::string old = old_folder(folder, base_name(target));
  if (!left.outputs.empty() && !storage.stat(target).exists && storage.stat(old).exists) {
    storage.rename(old, target);
    storage.sync_directory(folder);
    undone = true;
  }
  for (const std::string& path : left.begun) remove_tree(storage, path);
  for (const std::string& path : left.outputs) remove_tree(storage, path);  // only now: they tell whose `.old` it is
  if (!undone) return "";
  return str(target, ": a process died while it replaced this; the old content has its name again");
}

std::string where_old_lies(Storage& storage, const std::string& target) {
  const std::string name = base_name(target), folder = parent(target), old = old_folder(folder, name);
  if (name.empty() || storage.stat(target).exists) return "";
  const Stat there = storage.stat(old);
  if (!there.exists) return "";
  const bool full = there.is_directory && storage.stat(join(old, name)).exists;
  const bool is_ours = full || !left_at(storage, target).outputs.empty();  // recover_output's condition
  return str("; a process died while it replaced this: the old content is in ", old, full ? ", file by file" : "",
             is_ours
                 ? str(", and the next save or verb that writes to ", target, " gives it its name back (by hand: mv ")
                 : " (back to its name: mv ",
             old, full ? "/* " : " ", full ? folder : target, ")");
}

}  // namespace shardsmith::cli
