#include <algorithm>
#include <iostream>
#include <utility>

#include "base/error.h"
#include "checkpoint/load.h"
#include "cli/command_line.h"
#include "cli/describe.h"
#include "cli/source.h"
#include "cli/verbs.h"
#include "storage/storage.h"

namespace shardsmith::cli {
namespace {

struct Listed {
  Found found;
  bool full = false;  // a file; otherwise a folder
};

Value found_value(const Listed& listed) {
  const Found& found = listed.found;
  Value value;
  value.set("name", found.name);
  value.set("kind", listed.full ? "full" : "partial");
  value.set(listed.full ? "file" : "folder", found.folder);
  value.set("complete", found.complete);
  value.set("newest", found.newest);
  value.set("bytes", static_cast<int64_t>(found.bytes));
  if (!found.complete) value.set("why_not", found.why_not);
  value.set("manifest", found.manifest ? manifest_value(*found.manifest) : Value());
  return value;
}

void print_table(const std::vector<Listed>& all) {
  Table table({false, true, false, true});
  table.add({bold("NAME"), bold("STEP"), bold("LAYOUT"), bold("SIZE"), bold("SAVED"), bold("STATE")});
  for (const auto& [found, full] : all) {
    const Manifest* manifest = found.manifest ? &*found.manifest : nullptr;
    std::string state = found.complete ? green("complete") : red("incomplete: ") + printable(found.why_not);
    if (found.newest) state += ", newest";
    // A save that replaced this one died halfway.
    if (found.complete && !full && base_name(found.folder) != found.name) state += ", in " + base_name(found.folder);
    table.add({printable(found.name), manifest ? std::to_string(manifest->step) : "-",
               full       ? "full, one file"
               : manifest ? layout_words(*manifest)
                          : "-",
               human_bytes(found.bytes), manifest ? human_time(manifest->time) : "-", state});
  }
  std::cout << table.text("");
}

// Partial and full ones, newest first by step and time; those that don't say come last.
std::vector<Listed> list_all(Storage& storage, const std::string& path) {
  std::vector<Listed> all;
  for (auto& found : scan(storage, path)) {
    const bool full = found.kind == CheckpointKind::kFull;
    all.push_back({std::move(found), full});
  }
  std::stable_sort(all.begin(), all.end(), [](const Listed& a, const Listed& b) {
    const auto &left = a.found.manifest, &right = b.found.manifest;
    if (!left || !right) return left.has_value() > right.has_value();
    return std::pair(left->step, left->time) > std::pair(right->step, right->time);
  });
  return all;
}

}  // namespace

int run_ls(const Arguments& arguments) {
  CommandLine line("ls", "The checkpoints in a folder, complete or not, newest first.");
  std::string path = ".";
  line.app().add_option("DIR", path, "A folder of checkpoints")->capture_default_str();
  if (!line.parse(arguments)) return 0;
  Storage& storage = local_storage();
  path = existing_path(storage, path);
  check_folder_of_checkpoints(storage, path);
  const auto all = list_all(storage, path);
  if (line.output().json) {
    List list;
    for (const auto& listed : all) list.push_back(found_value(listed));
    Value object;
    object.set("path", path);
    object.set("checkpoints", list);
    line.output().print(object);
  } else if (all.empty()) {
    line.output().notice(str(path, ": no checkpoints"));
  } else {
    print_table(all);
  }
  return 0;
}

}  // namespace shardsmith::cli
