#include "checkpoint/full.h"

#include "base/error.h"
#include "checkpoint/commit.h"
#include "checkpoint/load.h"

namespace shardsmith {
namespace {

constexpr const char* kKey = "full";

std::string companion(const std::string& kind, const std::string& path) {
  return join(parent(path), kind + "_" + base_name(path));
}

// One file's tensors and values under `kind`.
void add(Index& whole, Index next, const std::string& kind) {
  const size_t before = whole.tensors.size();  // no two files have a name in common
  for (TensorEntry& tensor : next.tensors) {
    tensor.name = kind + "/" + tensor.name;
    if (!tensor.alias_of.empty()) tensor.alias_of = kind + "/" + tensor.alias_of;
  }
  Value value = std::move(next.values);
  whole.merge(std::move(next));
  for_each_tensor(value, [&](TensorRef& reference) { reference.index += before; });
  whole.values.set(kind, std::move(value));
}

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

// Moves files out of the way and back.
class Replacement {
 public:
  Replacement(Storage& storage, const std::string& path)
      : storage_(storage), old_(old_folder(parent(path), base_name(path))) {
    remove_tree(storage_, old_);
    for (const std::string& file : full_files(path)) {
      if (!storage_.stat(file).exists) continue;
      try {
        storage_.make_directory(old_);
        storage_.rename(file, join(old_, base_name(file)));
      } catch (...) {
        undo();
        throw;
      }
      moved_.push_back(file);
    }
  }
  void give_name(const std::string& from, const std::string& to) {
    try {
      storage_.rename(from, to);
      named_.push_back(to);
    } catch (...) {
      undo();
      throw;
    }
  }
  // Makes the new names durable; only then the old files go.
  void finish(const std::string& folder) {
    try {
      storage_.sync_directory(folder);
    } catch (...) {
      undo();
      throw;
    }
  }
  const std::string& old() const { return old_; }

 private:
  void undo() noexcept {
    try {
      for (const std::string& file : named_) storage_.remove_file(file);
      // The weights last, as they stand for the rest.
      for (auto file = moved_.rbegin(); file != moved_.rend(); ++file)
        storage_.rename(join(old_, base_name(*file)), *file);
      remove_tree(storage_, old_);
    } catch (...) {  // the files are in `.old`, whole
    }
  }

  Storage& storage_;
  std::string old_;
  std::vector<std::string> moved_, named_;
};

}  // namespace

std::vector<std::string> full_files(const std::string& path) {
  return {path, companion("user_content", path), companion("optimizer", path)};
}

bool is_full(Storage& storage, const std::string& path) {
  try {
    return read_pt_record(storage, path).extra.find(kKey) != nullptr;
  } catch (const Error& e) {
    // No zip of torch's, or a damaged one: whoever reads it says so.
    if (e.kind() == ErrorKind::kCorrupt || e.kind() == ErrorKind::kUnsupported) return false;
    throw;
  }
}

Index read_full(Storage& storage, const std::string& path, Manifest* manifest) {
  const PtRecord record = read_pt_record(storage, path);
  const Value* found = record.extra.find(kKey);
  if (!found) fail(ErrorKind::kCorrupt, path, ": no full checkpoint of ours: its extra record doesn't say so");
  Manifest full = manifest_from(*found, path);
  Index whole;
  whole.format = "full";
  add(whole, read_pt(storage, path), "model");
  for (const ManifestFile& file : full.files) {
    const std::string name = join(parent(path), file.name);
    std::string kind;
    for (const char* known : {"user_content", "optimizer"})
      if (companion(known, path) == name) kind = known;
    if (kind.empty()) fail(ErrorKind::kCorrupt, path, ": names '", file.name, "' as part of it, which can't be");
    check_file(storage, name, file);
    add(whole, read_pt(storage, name), kind);
  }
  if (manifest) *manifest = std::move(full);
  return whole;
}

Manifest write_full(Storage& storage, const std::string& path, Manifest manifest, const FullContent& content,
                    const std::function<void()>& before_names, std::vector<std::string>* left_behind) {
  manifest.save_id = make_save_id();
  manifest.time = seconds_now();
  manifest.files.clear();
  const std::string folder = temporary_folder(parent(path), base_name(path), manifest.save_id);
  storage.make_directory(folder);
  try {
    const auto write = [&](const std::string& name, PtContent file) {
      file.extra.set("save_id", manifest.save_id);
      const std::string to = join(folder, base_name(name));
      const Written written = write_pt(storage, to, file);
      manifest.files.push_back({base_name(name), written.size, written.digest, tail_digest(storage, to)});
    };
    if (content.user_content) write(companion("user_content", path), *content.user_content);
    if (content.optimizer) write(companion("optimizer", path), *content.optimizer);
    PtContent weights = content.weights;
    weights.extra.set("save_id", manifest.save_id);
    weights.extra.set(kKey, to_value(manifest));
    write_pt(storage, join(folder, base_name(path)), weights);
    storage.sync_directory(folder);
    if (before_names) before_names();

    Replacement replacement(storage, path);
    for (const ManifestFile& file : manifest.files)
      replacement.give_name(join(folder, file.name), join(parent(path), file.name));
    replacement.give_name(join(folder, base_name(path)), path);
    replacement.finish(parent(path));
    for (const std::string& left : {replacement.old(), folder}) {
      try {
        remove_tree(storage, left);
      } catch (const Error& e) {
        if (left_behind)
          left_behind->push_back(str(path, " is written, but ", left, " can't be removed; remove it (", e.what(), ")"));
      }
    }
  } catch (...) {
    try {
      remove_tree(storage, folder);
    } catch (const Error&) {  // the error that brought us here says more
    }
    throw;
  }
  return manifest;
}

bool recover_full(Storage& storage, const std::string& path) {
  const std::string folder = parent(path), old = old_folder(folder, base_name(path));
  if (base_name(path).ends_with("_partial")) return false;  // temporary folders of that name are a save's
  const std::string before = temporary_folder(folder, base_name(path), "");
  std::vector<std::string> temporaries;
  for (const std::string& entry : storage.list(folder)) {
    const std::string full = join(folder, entry);
    if (full.starts_with(before) && is_save_id(full.substr(before.size())) && storage.stat(full).is_directory)
      temporaries.push_back(full);
  }
  bool undone = false;
  for (const std::string& temporary : temporaries) {
    const std::string weights = join(temporary, base_name(path));
    if (storage.stat(path).exists || !storage.stat(weights).exists || !is_full(storage, weights)) continue;
    // New companions that have their names already lose them, so what is there then is old.
    const Manifest manifest = manifest_from(*read_pt_record(storage, weights).extra.find(kKey), weights);
    for (const ManifestFile& file : manifest.files) {
      const std::string named = join(folder, file.name);
      if (is_of_save(storage, named, manifest.save_id)) storage.rename(named, join(temporary, file.name));
    }
    if (!storage.stat(old).is_directory) continue;
    std::vector<std::string> files = full_files(path);
    for (auto file = files.rbegin(); file != files.rend(); ++file) {
      const std::string moved = join(old, base_name(*file));
      if (!storage.stat(moved).exists) continue;
      storage.rename(moved, *file);
      undone = true;
    }
    storage.sync_directory(folder);
    if (storage.list(old).empty()) storage.remove_directory(old);
  }
  for (const std::string& temporary : temporaries) remove_tree(storage, temporary);
  return undone;
}

}  // namespace shardsmith
