#include "checkpoint/full.h"

#include "base/error.h"
#include "checkpoint/commit.h"
#include "checkpoint/full_publication.h"
#include "checkpoint/load.h"

namespace shardsmith {
namespace {

constexpr const char* kKey = "full";

std::string companion(const std::string& kind, const std::string& path) {
  return join(parent(path), kind + "_" + base_name(path));
}

// One file's tensors and values under `kind`.
void add(Index& whole, Index next, const std::string& kind) {
  for (TensorEntry& tensor : next.tensors) {
    tensor.name = kind + "/" + tensor.name;
    if (!tensor.alias_of.empty()) tensor.alias_of = kind + "/" + tensor.alias_of;
  }
  Value value = std::move(next.values);
  const std::vector<size_t> places = whole.merge(std::move(next));
  for_each_tensor(value, [&](TensorRef& reference) { reference.index = places.at(reference.index); });
  whole.values.set(kind, std::move(value));
}

// Where a companion of the weights at `path` lies: beside them, or, while a dead save has left them in `.old`, perhaps
// still under its name one folder above.
std::string where_companion_lies(Storage& storage, const std::string& path, const ManifestFile& file) {
  const std::string beside = join(parent(path), file.name);
  if (parent(path) != old_folder(parent(parent(path)), base_name(path)) || storage.stat(beside).exists) return beside;
  return join(parent(parent(path)), file.name);
}

std::string kind_of(const std::string& path, const ManifestFile& file) {
  for (const char* known : {"user_content", "optimizer"})
    if (base_name(companion(known, path)) == file.name) return known;
  fail(ErrorKind::kCorrupt, path, ": names '", file.name, "' as part of it, which can't be");
}

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
  Manifest full = full_manifest(storage, path);
  Index whole;
  whole.format = "full";
  add(whole, read_pt(storage, path), "model");
  for (const ManifestFile& file : full.files) {
    const std::string kind = kind_of(path, file);
    const std::string where = where_companion_lies(storage, path, file);
    check_file(storage, where, file);
    add(whole, read_pt(storage, where), kind);
  }
  if (manifest) *manifest = std::move(full);
  return whole;
}

Manifest full_manifest(Storage& storage, const std::string& path) {
  const PtRecord record = read_pt_record(storage, path);
  const Value* found = record.extra.find(kKey);
  if (!found) fail(ErrorKind::kCorrupt, path, ": no full checkpoint of ours: its extra record doesn't say so");
  return manifest_from(*found, path);
}

FolderState look_at_full(Storage& storage, const std::string& path) {
  FolderState state;
  const Stat stat = storage.stat(path);
  if (!stat.exists) return state;
  state.completeness = Completeness::kIncomplete;
  if (stat.is_directory || stat.is_link) {
    state.why = "no plain file";
    return state;
  }
  try {
    state.manifest = full_manifest(storage, path);
    for (const ManifestFile& file : state.manifest->files) {
      kind_of(path, file);
      check_file(storage, where_companion_lies(storage, path, file), file);
    }
    state.completeness = Completeness::kComplete;
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kIo) throw;
    if (e.kind() == ErrorKind::kUnsupported && !state.manifest) state.completeness = Completeness::kUnknown;
    state.why = e.what();
  }
  return state;
}

uint64_t full_bytes(Storage& storage, const std::string& path, const Manifest& manifest) {
  uint64_t bytes = storage.stat(path).size;
  for (const ManifestFile& file : manifest.files) bytes += file.size;
  return bytes;
}

Value full_extra(const Manifest& manifest) {
  Value extra;
  extra.set("save_id", manifest.save_id);
  extra.set(kKey, to_value(manifest));
  return extra;
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
      manifest.files.push_back({base_name(name), written.size, written.digest, written.tail});
    };
    if (content.user_content) write(companion("user_content", path), *content.user_content);
    if (content.optimizer) write(companion("optimizer", path), *content.optimizer);
    PtContent weights = content.weights;
    weights.extra.set("save_id", manifest.save_id);
    weights.extra.set(kKey, to_value(manifest));
    write_pt(storage, join(folder, base_name(path)), weights);
    storage.sync_directory(folder);
    if (before_names) before_names();

    std::vector<std::string> names;
    for (const ManifestFile& file : manifest.files) names.push_back(file.name);
    names.push_back(base_name(path));
    FullPublication publication(storage, path, folder, names);
    for (std::string& line : publication.finish())
      if (left_behind) left_behind->push_back(std::move(line));
  } catch (...) {
    try {
      remove_tree(storage, folder);
    } catch (const Error&) {  // the error that brought us here says more
    }
    throw;
  }
  return manifest;
}

}  // namespace shardsmith
