#include "checkpoint/full_publication.h"

#include <algorithm>

#include "base/error.h"
#include "checkpoint/commit.h"
#include "checkpoint/full.h"
#include "format/pt.h"

namespace shardsmith {

FullPublication::FullPublication(Storage& storage, const std::string& path, const std::string& folder,
                                 const std::vector<std::string>& names)
    : storage_(storage), path_(path), folder_(folder), old_(old_folder(parent(path), base_name(path))) {
  remove_tree(storage_, old_);
  try {
    for (const std::string& file : full_files(path)) {
      if (!storage_.stat(file).exists) continue;
      storage_.make_directory(old_);
      storage_.rename(file, join(old_, base_name(file)));
      moved_.push_back(file);
    }
    for (const std::string& name : names) {
      storage_.rename(join(folder_, name), join(parent(path_), name));
      named_.push_back(name);
    }
    storage_.sync_directory(parent(path_));
  } catch (...) {
    undo();
    throw;
  }
}

void FullPublication::undo() noexcept {
  try {
    // The new weights first, the old ones last, as they stand for the rest.
    for (; !named_.empty(); named_.pop_back())
      storage_.rename(join(parent(path_), named_.back()), join(folder_, named_.back()));
    for (; !moved_.empty(); moved_.pop_back()) storage_.rename(join(old_, base_name(moved_.back())), moved_.back());
    remove_tree(storage_, old_);
    storage_.sync_directory(parent(path_));
  } catch (...) {  // the files are in `.old`, whole
  }
}

std::vector<std::string> FullPublication::finish() {
  std::vector<std::string> left_behind;
  for (const std::string& left : {old_, folder_}) {
    try {
      remove_tree(storage_, left);
    } catch (const Error& e) {
      left_behind.push_back(str(path_, " is written, but ", left, " can't be removed; remove it (", e.what(), ")"));
    }
  }
  return left_behind;
}

namespace {

bool is_of_save(Storage& storage, const std::string& path, const std::string& save_id) {
  if (!storage.stat(path).exists) return false;
  try {
    const Value extra = read_pt_record(storage, path).extra;
    const Value* id = extra.find("save_id");
    const std::string* text = id ? id->get_if<std::string>() : nullptr;
    return text && *text == save_id;
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kIo) throw;
    return false;
  }
}

// What is left of a dead publication of the weights at `path`.
struct Remains {
  std::vector<std::string> temporaries;  // folders
  std::string begun;                     // of them, the one whose files had got names, or were to
  bool has_old = false;                  // `.old`, and all in it is a full checkpoint's
};

Remains remains_of(Storage& storage, const std::string& path) {
  Remains remains;
  const std::string folder = parent(path), before = temporary_folder(folder, base_name(path), "");
  for (const std::string& entry : storage.list(folder)) {
    const std::string full = join(folder, entry);
    if (!full.starts_with(before) || !is_save_id(full.substr(before.size())) || !storage.stat(full).is_directory)
      continue;
    remains.temporaries.push_back(full);
    const std::string weights = join(full, base_name(path));
    if (storage.stat(weights).exists && is_full(storage, weights)) remains.begun = full;
  }
  const std::string old = old_folder(folder, base_name(path));
  if (storage.stat(old).is_directory) {
    std::vector<std::string> ours;
    for (const std::string& file : full_files(path)) ours.push_back(base_name(file));
    const std::vector<std::string> held = storage.list(old);
    remains.has_old = std::all_of(held.begin(), held.end(), [&](const std::string& name) {
      return std::find(ours.begin(), ours.end(), name) != ours.end();
    });
  }
  return remains;
}

// New companions that have their names already lose them.
void take_back(Storage& storage, const std::string& path, const std::string& temporary) {
  const std::string weights = join(temporary, base_name(path));
  const Manifest manifest = full_manifest(storage, weights);
  for (const ManifestFile& file : manifest.files) {
    const std::string named = join(parent(path), file.name);
    if (is_of_save(storage, named, manifest.save_id)) storage.rename(named, join(temporary, file.name));
  }
}

// The weights last. Whether there were any.
bool put_back(Storage& storage, const std::string& path) {
  const std::string old = old_folder(parent(path), base_name(path));
  bool any = false;
  std::vector<std::string> files = full_files(path);
  for (auto file = files.rbegin(); file != files.rend(); ++file) {
    const std::string moved = join(old, base_name(*file));
    if (!storage.stat(moved).exists) continue;
    storage.rename(moved, *file);
    any = true;
  }
  storage.sync_directory(parent(path));
  if (storage.list(old).empty()) storage.remove_directory(old);
  return any;
}

}  // namespace

bool recover_full(Storage& storage, const std::string& path) {
  const std::string folder = parent(path), name = base_name(path);
  if (name.ends_with("_partial")) return false;  // temporary folders of that name are a save's
  const Remains remains = remains_of(storage, path);
  if (remains.temporaries.empty() && !remains.has_old) return false;
  const std::string old = old_folder(folder, name);
  const FolderState now = look_at_full(storage, path);
  if (now.completeness == Completeness::kUnknown) return false;
  bool undone = false;
  if (now.completeness == Completeness::kComplete) {
    if (remains.has_old) remove_tree(storage, old);
  } else {
    const bool old_serves =
        remains.has_old && look_at_full(storage, join(old, name)).completeness == Completeness::kComplete;
    if (now.completeness == Completeness::kAbsent) {
      if (!remains.begun.empty()) take_back(storage, path, remains.begun);
      if (remains.has_old && (old_serves || !remains.begun.empty())) undone = put_back(storage, path);
    } else if (old_serves) {  // what has the name is damaged: it loses it before the old one gets it back
      const std::string gone = join(folder, "." + name + ".gone-" + make_save_id());
      storage.make_directory(gone);
      storage.rename(path, join(gone, name));
      undone = put_back(storage, path);
      remove_tree(storage, gone);
    } else if (remains.has_old && storage.list(old).empty()) {
      storage.remove_directory(old);
    }
  }
  for (const std::string& temporary : remains.temporaries) remove_tree(storage, temporary);
  return undone;
}

}  // namespace shardsmith
