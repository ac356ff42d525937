#include "checkpoint/save.h"

#include <algorithm>
#include <map>
#include <optional>

#include "base/error.h"
#include "checkpoint/commit.h"
#include "checkpoint/load.h"
#include "checkpoint/outcome.h"
#include "checkpoint/save_steps.h"
#include "checkpoint/shared_files.h"

namespace shardsmith {
namespace {

void check_request(const SaveRequest& request) {
  check_place(request.path, request.tag);
  for (const SaveFile& file : request.files) {
    if (!is_bare_name(file.name) || file.name.starts_with('.') || file.name == kManifestName) {
      fail(ErrorKind::kInvalidArgument, "'", file.name, "' can't be the name of a checkpoint's file");
    }
  }
}

uint64_t bytes_of(const SaveFile& file) {
  // Storages and, generously, what a file holds beside them: pickle, slice list, directory, padding of large records.
  uint64_t bytes = 4096;
  for (const ByteSource& source : file.content.storages) bytes += source.size + 4096;
  return bytes;
}

Value announcement(const SaveRequest& request, const SharedFiles& shared) {
  Value value;
  value.set("essentials", essentials("a partial checkpoint", request.path, request.tag, request.manifest));
  value.set("host", request.host.empty() ? host_identity() : request.host);
  List files;
  for (size_t i = 0; i < request.files.size(); ++i) {
    Value entry;
    entry.set("name", request.files[i].name);
    entry.set("bytes", static_cast<int64_t>(bytes_of(request.files[i])));
    shared.announce(i, entry);
    files.push_back(std::move(entry));
  }
  value.set("files", std::move(files));
  return value;
}

// Every rank comes to the same verdict over the same announcements.
void agree(const std::vector<Value>& announcements, SharedFiles& shared, int rank, bool across_hosts,
           std::vector<std::string>& warnings) {
  check_essentials(announcements);
  std::vector<List> files;
  std::vector<std::string> hosts;
  for (const Value& announcement : announcements) {
    files.push_back(*announcement.find("files")->get_if<List>());
    hosts.push_back(*announcement.find("host")->get_if<std::string>());
  }
  shared.plan(files, hosts, rank, across_hosts, warnings);
}

// Rank 0, before anything is written: sweeps what a dead save left, looks for room, makes the temporary folder.
std::string prepare(Storage& storage, const SaveRequest& request, const SharedFiles& shared) {
  make_durable_directory(storage, request.path);
  recover(storage, request.path);
  const std::string name = partial_name(request.tag), target = join(request.path, name);
  const Stat there = storage.stat(target);
  if (there.exists &&
      (!there.is_directory || (!storage.stat(join(target, kManifestName)).exists && !storage.list(target).empty()))) {
    fail(ErrorKind::kInvalidArgument, target, " is there but is no checkpoint of ours (it has no ", kManifestName,
         "); move it away or use another tag");
  }
  check_room(storage, request.path, shared.bytes());
  const std::string id = make_save_id(), folder = temporary_folder(request.path, name, id);
  storage.make_directory(folder);
  try {
    shared.create(storage, folder);
  } catch (...) {
    remove_quietly(storage, folder);
    throw;
  }
  return id;
}

// Those of this rank's files that it writes alone (all where `shared` is null), synced.
List write_files(Storage& storage, const std::vector<SaveFile>& files, const SharedFiles* shared,
                 const std::string& folder, const std::string& save_id, const Progress& progress) {
  List written;
  const auto is_own = [&](size_t i) { return !shared || shared->is_own(i); };
  uint64_t total = 0, done = 0;
  for (size_t i = 0; i < files.size(); ++i) total += is_own(i) ? bytes_of(files[i]) : 0;
  for (size_t i = 0; i < files.size(); ++i) {
    if (!is_own(i)) continue;
    const SaveFile& file = files[i];
    const Written result = write_pt(storage, join(folder, file.name), with_save_id(file.content, save_id));
    Value entry;
    entry.set("name", file.name);
    entry.set("size", static_cast<int64_t>(result.size));
    entry.set("digest", result.digest);
    entry.set("tail", result.tail);
    written.push_back(std::move(entry));
    done += bytes_of(file);
    if (progress) progress({"write", done, total, "bytes"});
  }
  return written;
}

void add_files(std::vector<ManifestFile>& files, const Value& entries) {
  for (const Value& entry : *entries.get_if<List>()) {
    files.push_back({*entry.find("name")->get_if<std::string>(),
                     static_cast<uint64_t>(*entry.find("size")->get_if<int64_t>()),
                     *entry.find("digest")->get_if<std::string>(), *entry.find("tail")->get_if<std::string>()});
  }
}

// In the order in which the ranks announced them, whoever has written them.
void put_in_order(std::vector<ManifestFile>& files, const std::vector<Value>& announcements) {
  std::map<std::string, size_t> places;
  for (const Value& announcement : announcements)
    for (const Value& entry : *announcement.find("files")->get_if<List>())
      places.emplace(*entry.find("name")->get_if<std::string>(), places.size());
  std::sort(files.begin(), files.end(),
            [&](const ManifestFile& a, const ManifestFile& b) { return places.at(a.name) < places.at(b.name); });
}

void write_manifest(Storage& storage, const std::string& folder, const Manifest& manifest) {
  const std::string text = to_json_text(manifest);
  const auto file = storage.create(join(folder, kManifestName));
  file->write(0, std::as_bytes(std::span(text)));
  file->sync();
  file->close();
  storage.sync_directory(folder);
}

// Steps 2 to 5 of the commit rule; rank 0.
Value commit(Storage& storage, const SaveRequest& request, const std::string& folder, const Manifest& manifest) {
  const std::string& path = request.path;
  const std::string name = partial_name(request.tag), newest = read_newest(storage, path);
  write_manifest(storage, folder, manifest);
  Publication publication(storage, path, folder, name);
  try {
    write_newest(storage, path, name);
  } catch (...) {
    publication.undo();
    set_back_newest(storage, path, newest);
    throw;
  }
  Value value;
  List pruned, warnings;
  const auto tidy = [&](const auto& work) {
    try {
      work();
    } catch (const Error& e) {
      warnings.emplace_back(str("the checkpoint is saved, but tidying up failed: ", e.what()));
    }
  };
  tidy([&] { publication.finish(); });
  tidy([&] {
    const int keep = request.num_kept_partial_checkpoints.value_or(-1);
    for (std::string& removed : prune(storage, path, keep, name)) pruned.emplace_back(std::move(removed));
  });
  value.set("pruned", std::move(pruned));
  value.set("warnings", std::move(warnings));
  return value;
}

}  // namespace

SaveResult save_partial(Storage& storage, Peers& peers, const SaveRequest& request) {
  const bool first = peers.rank() == 0;
  const auto each = [&](const std::function<Value()>& work) { return all_do(peers, request.deadline, work); };

  std::optional<SharedFiles> shared;
  std::vector<std::string> warnings;
  const std::vector<Value> announcements = each([&] {
    check_request(request);
    shared.emplace(request.files);
    return announcement(request, *shared);
  });
  agree(announcements, *shared, peers.rank(), storage.is_shared_by_hosts(), warnings);
  const std::vector<Value> prepared = each([&]() -> Value { return first ? prepare(storage, request, *shared) : ""; });
  const std::string save_id = *prepared[0].get_if<std::string>();
  const std::string folder = temporary_folder(request.path, partial_name(request.tag), save_id);

  Manifest manifest = request.manifest;
  manifest.tag = request.tag;
  manifest.save_id = save_id;
  bool answered = false;  // all have stopped writing: the folder can be removed
  try {
    const std::vector<Value> written = each([&] {
      Value value;
      value.set("files", write_files(storage, request.files, &*shared, folder, save_id, request.progress));
      value.set("shared", shared->write(storage, folder, request.progress));
      return value;
    });
    for (const Value& value : written) add_files(manifest.files, *value.find("files"));
    if (shared->any()) {
      std::vector<Value> checksums;
      for (const Value& value : written) checksums.push_back(*value.find("shared"));
      for (const Value& entries : each([&]() -> Value { return shared->finish(checksums, save_id); }))
        add_files(manifest.files, entries);
    }
    put_in_order(manifest.files, announcements);
    answered = true;
    const std::vector<Value> committed = each([&]() -> Value {
      if (!first) return None{};
      manifest.time = seconds_now();
      return commit(storage, request, folder, manifest);
    });
    SaveResult result{.folder = join(request.path, partial_name(request.tag))};
    for (const ManifestFile& file : manifest.files) result.bytes += file.size;
    result.pruned = texts(*committed[0].find("pruned"));
    result.warnings = std::move(warnings);
    for (std::string& line : texts(*committed[0].find("warnings"))) result.warnings.push_back(std::move(line));
    return result;
  } catch (const Error& e) {
    // A rank that gave no answer may still be writing; then the next save sweeps.
    const bool silent = e.kind() == ErrorKind::kTimeout || e.kind() == ErrorKind::kPeer;
    shared.reset();
    if (first && (answered || !silent)) remove_quietly(storage, folder);
    throw;
  }
}

Manifest write_partial(Storage& storage, const std::string& folder, Manifest manifest,
                       const std::vector<SaveFile>& files) {
  manifest.save_id = make_save_id();
  manifest.files.clear();
  add_files(manifest.files, write_files(storage, files, nullptr, folder, manifest.save_id, {}));
  manifest.time = seconds_now();
  write_manifest(storage, folder, manifest);
  return manifest;
}

namespace {

// The fields that make a model this model, under the names that configurations give them.
struct ModelField {
  const char* word;
  std::vector<const char*> keys;
};
const std::vector<ModelField> kModelFields = {{"model_type", {"model_type"}},
                                              {"hidden size", {"hidden_size", "n_embd"}},
                                              {"layers", {"num_hidden_layers", "n_layer"}},
                                              {"vocabulary", {"vocab_size"}}};

const Value* field_of(const Value& config, const ModelField& field) {
  for (const char* key : field.keys) {
    if (const Value* found = config.find(key)) return found;
  }
  return nullptr;
}

}  // namespace

void check_same_model(Storage& storage, const std::string& path, const Value& model_config) {
  if (!storage.stat(path).exists) return;
  for (const Found& found : scan(storage, path)) {
    if (!found.manifest) continue;
    std::string differences;
    for (const ModelField& field : kModelFields) {
      const Value* theirs = field_of(found.manifest->model_config, field);
      const Value* ours = field_of(model_config, field);
      if (!theirs || !ours || *theirs == *ours) continue;
      differences += str(differences.empty() ? "" : ", ", field.word, " ", to_json(*theirs), " there and ",
                         to_json(*ours), " here");
    }
    if (!differences.empty()) {
      fail(ErrorKind::kInvalidArgument, found.folder, " is a checkpoint of another model: ", differences,
           "; use another output folder");
    }
  }
}

}  // namespace shardsmith
