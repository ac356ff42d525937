#include "checkpoint/save_steps.h"

#include <unistd.h>

#include <fstream>

#include "base/error.h"
#include "checkpoint/commit.h"

namespace shardsmith {

void check_place(const std::string& path, const std::string& tag) {
  if (path.empty()) fail(ErrorKind::kInvalidArgument, "the folder to save to is empty");
  // Names that begin with a dot are those of unfinished saves.
  if (!is_bare_name(tag) || tag.starts_with('.')) {
    fail(ErrorKind::kInvalidArgument, "tag '", tag,
         "' can't be a folder's name: it must not be empty, begin with '.' or contain '/' or control characters");
  }
  if (tag.size() > 200) fail(ErrorKind::kInvalidArgument, "the tag has ", tag.size(), " bytes, at most 200 fit");
}

Value essentials(const std::string& kind, const std::string& path, const std::string& tag, const Manifest& m) {
  Value value;
  value.set("kind", kind);
  value.set("path", path);
  value.set("tag", tag);
  value.set("step", m.step);
  value.set("world_size", m.world_size);
  value.set("pp", m.pp);
  value.set("tp", m.tp);
  value.set("rdp", m.rdp);
  value.set("placement", m.placement);
  std::string partition;
  for (int first : m.partition.first) partition += (partition.empty() ? "" : " ") + std::to_string(first);
  value.set("partition", partition);
  return value;
}

void fail_differing(size_t rank, const std::string& text) {
  throw Error(ErrorKind::kInvalidArgument, text + "; nothing was written", static_cast<int>(rank));
}

void check_essentials(const std::vector<Value>& announcements) {
  const auto of = [&](size_t rank) -> const Value& {
    const Value* found = announcements[rank].find("essentials");
    if (!found || !found->get_if<Dict>()) fail_differing(rank, str("rank ", rank, " saves no checkpoint now"));
    return *found;
  };
  const Dict& first = *of(0).get_if<Dict>();
  for (size_t rank = 0; rank < announcements.size(); ++rank) {
    const Value& theirs = of(rank);
    for (const auto& [key, value] : first.items) {
      const std::string& what = *key.get_if<std::string>();
      if (!theirs.find(what)) fail_differing(rank, str("rank ", rank, " doesn't say which ", what, " it saves"));
      if (*theirs.find(what) == value) continue;
      fail_differing(rank, str("rank ", rank, " saves ", what, " ", to_json(*theirs.find(what)), " but rank 0 saves ",
                               what, " ", to_json(value)));
    }
  }
}

void make_durable_directory(Storage& storage, const std::string& path) {
  std::vector<std::string> missing;
  for (std::string at = path; !storage.stat(at).exists; at = parent(at)) {
    missing.push_back(at);
    if (parent(at) == at) break;
  }
  storage.make_directory(path);
  for (const std::string& made : missing) storage.sync_directory(parent(made));
}

namespace {

std::string gigabytes(uint64_t bytes) { return str(static_cast<double>(bytes / 1000000) / 1000, " GB"); }

}  // namespace

void check_room(Storage& storage, const std::string& path, uint64_t bytes) {
  const uint64_t free = storage.free_bytes(path);
  if (bytes > free) {
    fail(ErrorKind::kNoSpace, path, ": the checkpoint needs ", gigabytes(bytes), " but ", gigabytes(free),
         " are free; nothing was written");
  }
}

void remove_quietly(Storage& storage, const std::string& folder) noexcept {
  try {
    remove_tree(storage, folder);
  } catch (...) {
  }
}

void set_back_newest(Storage& storage, const std::string& path, const std::string& before) noexcept {
  try {
    if (read_newest(storage, path) == before) return;
    before.empty() ? storage.remove_file(join(path, kNewestName)) : write_newest(storage, path, before);
  } catch (...) {  // a pointer to nothing is passed over by every reader
  }
}

PtContent with_save_id(PtContent content, const std::string& save_id) {
  content.extra.set("save_id", save_id);
  return content;
}

std::string host_identity() {
  static const std::string identity = [] {
    char name[256] = "";
    ::gethostname(name, sizeof name - 1);
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    return str(name, "/", boot);
  }();
  return identity;
}

std::vector<std::string> texts(const Value& list) {
  std::vector<std::string> result;
  for (const Value& item : *list.get_if<List>()) result.push_back(*item.get_if<std::string>());
  return result;
}

Value list_of(const std::vector<std::string>& texts) {
  List list;
  for (const std::string& text : texts) list.emplace_back(text);
  return list;
}

}  // namespace shardsmith
