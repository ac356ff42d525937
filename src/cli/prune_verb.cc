// `shardsmith prune`: asks, and prints what goes.
#include <unistd.h>

#include <iostream>
#include <string>

#include "base/error.h"
#include "cli/command_line.h"
#include "cli/describe.h"
#include "cli/prune.h"
#include "cli/source.h"
#include "cli/verbs.h"

namespace shardsmith::cli {
namespace {

std::string count_of(size_t n) { return str(n, n == 1 ? " checkpoint" : " checkpoints"); }

void print_plan(const PrunePlan& plan) {
  Table table({false, false, true});
  for (const auto& one : plan.gone) {
    table.add({red("goes"), printable(one.name), str("step ", one.step), human_bytes(one.bytes)});
  }
  for (const auto& one : plan.kept) table.add({green("stays"), printable(one.name), "", printable(one.why)});
  for (const auto& one : plan.left_alone) table.add({"left alone", printable(one.name), "", printable(one.why)});
  std::cout << table.text("");
}

List kept_value(const std::vector<Kept>& all) {
  List list;
  for (const auto& one : all) {
    Value entry;
    entry.set("name", one.name);
    entry.set("why", one.why);
    list.push_back(entry);
  }
  return list;
}

Value plan_value(const std::string& path, const PrunePlan& plan, const std::vector<Pruned>& removed) {
  const auto pruned = [](const std::vector<Pruned>& all) {
    List list;
    for (const auto& one : all) {
      Value entry;
      entry.set("name", one.name);
      entry.set("step", one.step);
      entry.set("bytes", static_cast<int64_t>(one.bytes));
      list.push_back(entry);
    }
    return list;
  };
  uint64_t freed = 0;
  for (const auto& one : removed) freed += one.bytes;
  Value value;
  value.set("path", path);
  value.set("goes", pruned(plan.gone));
  value.set("stays", kept_value(plan.kept));
  value.set("left_alone", kept_value(plan.left_alone));
  value.set("bytes", static_cast<int64_t>(plan.bytes()));
  value.set("removed", pruned(removed));
  value.set("bytes_freed", static_cast<int64_t>(freed));
  return value;
}

bool ask(const PrunePlan& plan) {
  std::cout << std::flush;
  std::cerr << "Remove " << count_of(plan.gone.size()) << ", " << human_bytes(plan.bytes()) << "? [y/N] " << std::flush;
  std::string answer;
  std::getline(std::cin, answer);
  return answer == "y" || answer == "Y" || answer == "yes";
}

}  // namespace

int run_prune(const Arguments& arguments) {
  CommandLine line(
      "prune",
      "Removes old checkpoints of a folder; what several options keep stays. The newest complete one and the\n"
      "one that `newest` names always stay, and so does every folder that is no checkpoint of ours.");
  std::string path;
  PruneOptions options;
  int64_t last = 0, every = 0;
  bool dry_run = false, yes = false;
  auto& app = line.app();
  app.add_option("DIR", path, "A folder of checkpoints")->required();
  auto* keep_last = app.add_option("--keep-last", last, "Keep the newest N");
  auto* keep_every = app.add_option("--keep-every", every, "Keep those whose step is a multiple of N");
  app.add_option("--keep", options.keep, "Keep the one of this tag; may be repeated")->allow_extra_args(false);
  app.add_flag("--incomplete", options.incomplete, "Also remove incomplete ones that have a manifest");
  app.add_flag("--dry-run", dry_run, "Only say what would go");
  app.add_flag("-y,--yes", yes, "Don't ask");
  if (!line.parse(arguments)) return 0;
  if (keep_last->count() > 0) options.keep_last = last;
  if (keep_every->count() > 0) options.keep_every = every;

  Storage& storage = local_storage();
  path = existing_path(storage, path);
  check_folder_of_checkpoints(storage, path);
  const PrunePlan plan = plan_prune(storage, path, options);
  const bool json = line.output().json;
  if (!json) print_plan(plan);
  std::vector<Pruned> removed;
  bool agreed = yes;
  if (!dry_run && !yes && !plan.gone.empty()) {
    if (json || isatty(STDIN_FILENO) != 1 || isatty(STDERR_FILENO) != 1) {
      fail(ErrorKind::kInvalidArgument, "prune: ", count_of(plan.gone.size()), " of ", human_bytes(plan.bytes()),
           " would go, and there is no terminal to ask at: --yes removes them, --dry-run only lists them");
    }
    agreed = ask(plan);
  }
  if (!dry_run && agreed) removed = run_plan(storage, path, plan);
  if (json) {
    line.output().print(plan_value(path, plan, removed));
    return 0;
  }
  uint64_t freed = 0;
  for (const auto& one : removed) freed += one.bytes;
  if (plan.gone.empty())
    std::cout << "nothing to remove\n";
  else if (dry_run)
    std::cout << "would remove " << count_of(plan.gone.size()) << ", " << human_bytes(plan.bytes()) << "\n";
  else if (!agreed)
    std::cout << "nothing was removed\n";
  else
    std::cout << "removed " << count_of(removed.size()) << ", " << human_bytes(freed) << " freed\n";
  return 0;
}

}  // namespace shardsmith::cli
