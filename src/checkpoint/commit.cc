#include "checkpoint/commit.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>

#include "base/error.h"
#include "checkpoint/full.h"
#include "checkpoint/load.h"
#include "format/pt.h"

namespace shardsmith {
namespace {

constexpr size_t kSaveIdDigits = 16;
constexpr std::string_view kProbe = ".exchange-probe-";

// ".{name}{infix}{save_id}" -> name; "" for anything else.
std::string name_before(std::string_view entry, std::string_view infix) {
  const size_t at = entry.rfind(infix);
  if (!entry.starts_with('.') || at == std::string_view::npos || at < 2) return "";
  if (!is_save_id(entry.substr(at + infix.size()))) return "";
  return std::string(entry.substr(1, at - 1));
}

// ".{name}.old" -> name.
std::string name_before_old(std::string_view entry) {
  constexpr std::string_view kOld = "_partial.old";
  if (!entry.starts_with('.') || !entry.ends_with(kOld) || entry.size() <= kOld.size() + 1) return "";
  return std::string(entry.substr(1, entry.size() - 1 - std::string_view(".old").size()));
}

std::string gone_folder(const std::string& path, const std::string& name) {
  return join(path, "." + name + ".gone-" + make_save_id());
}

// A folder loses its name before it loses its content.
void remove_named(Storage& storage, const std::string& path, const std::string& folder, const std::string& name) {
  const std::string gone = gone_folder(path, name);
  storage.rename(folder, gone);
  storage.sync_directory(path);
  remove_tree(storage, gone);
}

void recover_old(Storage& storage, const std::string& path, const std::string& name) {
  const std::string folder = join(path, name), old = old_folder(path, name);
  const FolderState now = look_at(storage, folder);
  if (now.completeness == Completeness::kUnknown) return;
  if (now.completeness == Completeness::kComplete) return remove_tree(storage, old);
  if (now.completeness == Completeness::kIncomplete) {
    // Two halves: the old one is of use only if it is whole.
    const Completeness before = look_at(storage, old).completeness;
    if (before == Completeness::kUnknown) return;
    if (before != Completeness::kComplete) return remove_tree(storage, old);
    remove_named(storage, path, folder, name);
  }
  storage.rename(old, folder);
  storage.sync_directory(path);
}

void write_file(Storage& storage, const std::string& path, const std::string& text) {
  const auto file = storage.create(path);
  file->write(0, std::as_bytes(std::span(text)));
  file->close();
}

}  // namespace

bool is_save_id(std::string_view text) {
  return text.size() == kSaveIdDigits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::string partial_name(const std::string& tag) { return tag + "_partial"; }

std::string temporary_folder(const std::string& path, const std::string& name, const std::string& save_id) {
  return join(path, "." + name + ".tmp-" + save_id);
}

std::string old_folder(const std::string& path, const std::string& name) { return join(path, "." + name + ".old"); }

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string make_save_id() {
  static std::atomic<uint64_t> counter{0};
  std::random_device device;
  const uint64_t now = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  std::seed_seq seed{device(),
                     device(),
                     static_cast<unsigned>(now),
                     static_cast<unsigned>(now >> 32),
                     static_cast<unsigned>(::getpid()),
                     static_cast<unsigned>(counter.fetch_add(1))};
  std::mt19937_64 random(seed);
  uint64_t bits = random();
  std::string id(kSaveIdDigits, '0');
  for (char& c : id) c = "0123456789abcdef"[bits & 15], bits >>= 4;
  return id;
}

FolderState look_at(Storage& storage, const std::string& folder) {
  FolderState state;
  const Stat stat = storage.stat(folder);
  if (!stat.exists) return state;
  state.completeness = Completeness::kIncomplete;
  if (!stat.is_directory) {
    state.why = "not a folder";
    return state;
  }
  try {
    state.manifest = read_manifest(storage, folder);
    std::vector<std::string> missing;
    for (const ManifestFile& file : state.manifest->files)
      if (!storage.stat(join(folder, file.name)).exists) missing.push_back(file.name);
    if (!missing.empty()) {
      std::string more;
      for (size_t i = 1; i < missing.size(); ++i) more += (i > 1 ? ", " : ", and so ") + missing[i];
      if (missing.size() > 1) more += missing.size() > 2 ? " are" : " is";
      fail(ErrorKind::kCorrupt, join(folder, missing[0]), " is missing", more);
    }
    for (const ManifestFile& file : state.manifest->files) {
      const std::string path = join(folder, file.name);
      const Stat found = storage.stat(path);
      if (found.is_link || found.is_directory) fail(ErrorKind::kCorrupt, path, " is no plain file");
      if (found.size != file.size) {
        fail(ErrorKind::kCorrupt, path, " has ", found.size, " bytes, the manifest says ", file.size);
      }
      const std::string digest = read_pt_digest(storage, path);
      if (digest != file.digest) {
        fail(ErrorKind::kCorrupt, path, " has digest '", digest, "', the manifest says '", file.digest, "'");
      }
    }
    state.completeness = Completeness::kComplete;
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kIo) throw;
    if (e.kind() == ErrorKind::kUnsupported && !state.manifest) state.completeness = Completeness::kUnknown;
    state.why = e.kind() == ErrorKind::kNotFound && !state.manifest ? str("no ", kManifestName) : e.what();
  }
  return state;
}

Publication::Publication(Storage& storage, const std::string& path, const std::string& folder, const std::string& name)
    : storage_(storage), path_(path), folder_(folder), name_(name) {
  try {
    put_in_place();
    storage_.sync_directory(path_);
  } catch (...) {
    undo();
    throw;
  }
}

void Publication::put_in_place() {
  const std::string target = join(path_, name_);
  if (!storage_.stat(target).exists) {
    storage_.rename(folder_, target);
    in_place_ = true;
    return;
  }
  if (exchange_works(storage_, path_) && storage_.exchange(folder_, target)) {
    exchanged_ = in_place_ = true;
    return;
  }
  storage_.rename(target, old_folder(path_, name_));
  moved_aside_ = true;
  storage_.rename(folder_, target);
  in_place_ = true;
}

void Publication::undo() noexcept {
  const std::string target = join(path_, name_);
  try {
    if (exchanged_) {
      if (storage_.exchange(folder_, target)) exchanged_ = in_place_ = false;
    } else if (in_place_) {
      storage_.rename(target, folder_);
      in_place_ = false;
    }
    if (moved_aside_ && !in_place_) {
      storage_.rename(old_folder(path_, name_), target);
      moved_aside_ = false;
    }
    storage_.sync_directory(path_);
  } catch (...) {  // the error that led here is the one to tell
  }
}

void Publication::finish() {
  if (exchanged_) remove_tree(storage_, folder_);
  if (moved_aside_) remove_tree(storage_, old_folder(path_, name_));
}

bool exchange_works(Storage& storage, const std::string& path) {
  const std::string id = make_save_id();
  const std::string a = join(path, str(kProbe, id, "-a")), b = join(path, str(kProbe, id, "-b"));
  const auto holds = [&](const std::string& folder, const std::string& text) {
    return storage.list(folder) == std::vector<std::string>{"content"} &&
           read_text(storage, join(folder, "content")) == text;
  };
  bool works = false;
  try {
    for (const std::string& folder : {a, b}) {
      storage.make_directory(folder);
      write_file(storage, join(folder, "content"), folder);
    }
    works = storage.exchange(a, b) && holds(a, b) && holds(b, a);
  } catch (const Error& e) {
    // One that answers with an error can't be relied on; a full or broken disk is told by the caller's next call.
    works = false;
  }
  remove_tree(storage, a);
  remove_tree(storage, b);
  return works;
}

void write_newest(Storage& storage, const std::string& path, const std::string& name) {
  write_text_atomic(storage, join(path, kNewestName), name + "\n");
}

std::string read_newest(Storage& storage, const std::string& path) {
  std::string name;
  try {
    name = read_text(storage, join(path, kNewestName), 4096);
  } catch (const Error&) {  // none, too long, or unreadable: the scan serves
    return "";
  }
  while (!name.empty() && (name.back() == '\n' || name.back() == '\r' || name.back() == ' ')) name.pop_back();
  return is_bare_name(name) && name != kNewestName ? name : "";
}

void recover(Storage& storage, const std::string& path) {
  for (const std::string& entry : storage.list(path)) {
    const std::string full = join(path, entry);
    if (const std::string name = name_before_old(entry); !name.empty()) {
      if (storage.stat(full).is_directory) recover_old(storage, path, name);
    }
  }
  for (const std::string& entry : storage.list(path)) {
    std::string name = name_before(entry, ".tmp-");
    if (name.empty() && entry.starts_with('.') && entry.ends_with(".old")) name = entry.substr(1, entry.size() - 5);
    if (!name.empty() && storage.stat(join(path, entry)).is_directory) recover_full(storage, join(path, name));
  }
  // What recover_old() has renamed is there only now.
  for (const std::string& entry : storage.list(path)) {
    const std::string full = join(path, entry);
    const std::string_view view = entry;
    const bool folder = !name_before(entry, ".tmp-").empty() || !name_before(entry, ".gone-").empty() ||
                        (view.starts_with(kProbe) && view.size() == kProbe.size() + kSaveIdDigits + 2);
    if (folder && storage.stat(full).is_directory) remove_tree(storage, full);
    if (view.starts_with(str(".", kNewestName, ".tmp-")) && !storage.stat(full).is_directory) storage.remove_file(full);
  }
}

void remove_checkpoints(Storage& storage, const std::string& path, const std::vector<std::string>& names) {
  std::vector<std::string> gone;
  for (const std::string& name : names) {
    gone.push_back(gone_folder(path, name));
    storage.rename(join(path, name), gone.back());
  }
  if (!gone.empty()) storage.sync_directory(path);
  for (const std::string& folder : gone) remove_tree(storage, folder);
}

std::vector<std::string> prune(Storage& storage, const std::string& path, int keep, const std::string& just_saved) {
  std::vector<std::string> names;
  if (keep < 0) return names;
  const std::vector<Found> all = scan(storage, path);  // newest first
  const auto saved = std::find_if(all.begin(), all.end(), [&](const Found& found) { return found.name == just_saved; });
  std::string stays = just_saved;  // whatever its step
  if (saved != all.end() && saved->kind == CheckpointKind::kFull) {
    // A full checkpoint is no state of training to go on from: the one that a resume would take stays.
    const auto found = find_checkpoint(storage, path, "", nullptr);
    stays = found ? found->name : "";
    keep = std::max(keep, 1);
  }
  int kept = stays.empty() ? 0 : 1;
  for (const Found& found : all) {
    if (found.kind != CheckpointKind::kPartial || !found.complete || found.name == stays ||
        found.folder != join(path, found.name))
      continue;
    if (kept < keep) {
      ++kept;
    } else {
      names.push_back(found.name);
    }
  }
  remove_checkpoints(storage, path, names);
  return names;
}

}  // namespace shardsmith
