#include <iostream>

#include "base/error.h"
#include "checkpoint/load.h"
#include "cli/command_line.h"
#include "cli/describe.h"
#include "cli/source.h"
#include "cli/verbs.h"
#include "storage/storage.h"

namespace shardsmith::cli {
namespace {

Value found_value(const Found& found) {
  Value value;
  value.set("name", found.name);
  value.set("folder", found.folder);
  value.set("complete", found.complete);
  value.set("newest", found.newest);
  value.set("bytes", static_cast<int64_t>(found.bytes));
  if (!found.complete) value.set("why_not", found.why_not);
  value.set("manifest", found.manifest ? manifest_value(*found.manifest) : Value());
  return value;
}

void print_table(const std::vector<Found>& all) {
  Table table({false, true, false, true});
  table.add({bold("NAME"), bold("STEP"), bold("LAYOUT"), bold("SIZE"), bold("SAVED"), bold("STATE")});
  for (const auto& found : all) {
    const Manifest* manifest = found.manifest ? &*found.manifest : nullptr;
    std::string state = found.complete ? green("complete") : red("incomplete: ") + printable(found.why_not);
    if (found.newest) state += ", newest";
    // A save that replaced this one died halfway.
    if (found.complete && base_name(found.folder) != found.name) state += ", in " + base_name(found.folder);
    table.add({printable(found.name), manifest ? std::to_string(manifest->step) : "-",
               manifest ? layout_words(*manifest) : "-", human_bytes(found.bytes),
               manifest ? human_time(manifest->time) : "-", state});
  }
  std::cout << table.text("");
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
  const auto all = scan(storage, path);
  if (line.output().json) {
    List list;
    for (const auto& found : all) list.push_back(found_value(found));
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
