#include "checkpoint/save.h"

#include <set>

#include "base/error.h"
#include "checkpoint/commit.h"
#include "checkpoint/load.h"
#include "checkpoint/outcome.h"
#include "checkpoint/save_steps.h"

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

Value announcement(const SaveRequest& request) {
  Value value;
  value.set("essentials", essentials("a partial checkpoint", request.path, request.tag, request.manifest));
  List names;
  uint64_t bytes = 0;
  for (const SaveFile& file : request.files) {
    names.emplace_back(file.name);
    bytes += bytes_of(file);
  }
  value.set("files", std::move(names));
  value.set("bytes", static_cast<int64_t>(bytes));
  return value;
}

// Every rank comes to the same verdict over the same announcements. Returns the bytes of all.
uint64_t agree(const std::vector<Value>& announcements) {
  check_essentials(announcements);
  uint64_t bytes = 0;
  std::set<std::string> names;
  for (size_t rank = 0; rank < announcements.size(); ++rank) {
    for (const Value& name : *announcements[rank].find("files")->get_if<List>()) {
      const std::string& text = *name.get_if<std::string>();
      if (!names.insert(text).second)
        fail_differing(rank, str("rank ", rank, " saves ", text, ", which another file is called too"));
    }
    bytes += static_cast<uint64_t>(*announcements[rank].find("bytes")->get_if<int64_t>());
  }
  return bytes;
}

// Rank 0, before anything is written: sweeps what a dead save left, looks for room, makes the temporary folder.
std::string prepare(Storage& storage, const SaveRequest& request, uint64_t bytes) {
  make_durable_directory(storage, request.path);
  recover(storage, request.path);
  const std::string name = partial_name(request.tag), target = join(request.path, name);
  const Stat there = storage.stat(target);
  if (there.exists &&
      (!there.is_directory || (!storage.stat(join(target, kManifestName)).exists && !storage.list(target).empty()))) {
    fail(ErrorKind::kInvalidArgument, target, " is there but is no checkpoint of ours (it has no ", kManifestName,
         "); move it away or use another tag");
  }
  check_room(storage, request.path, bytes);
  const std::string id = make_save_id();
  storage.make_directory(temporary_folder(request.path, name, id));
  return id;
}

// This rank's files, synced.
Value write_files(Storage& storage, const std::vector<SaveFile>& files, const std::string& folder,
                  const std::string& save_id, const Progress& progress) {
  List written;
  uint64_t total = 0, done = 0;
  for (const SaveFile& file : files) total += bytes_of(file);
  for (const SaveFile& file : files) {
    PtContent content = file.content;
    content.extra.set("save_id", save_id);
    const Written result = write_pt(storage, join(folder, file.name), content);
    Value entry;
    entry.set("name", file.name);
    entry.set("size", static_cast<int64_t>(result.size));
    entry.set("digest", result.digest);
    entry.set("tail", tail_digest(storage, join(folder, file.name)));
    written.push_back(std::move(entry));
    done += bytes_of(file);
    if (progress) progress({"write", done, total, "bytes"});
  }
  return written;
}

std::vector<ManifestFile> files_of(const std::vector<Value>& answers) {
  std::vector<ManifestFile> files;
  for (const Value& answer : answers) {
    for (const Value& entry : *answer.get_if<List>()) {
      files.push_back({*entry.find("name")->get_if<std::string>(),
                       static_cast<uint64_t>(*entry.find("size")->get_if<int64_t>()),
                       *entry.find("digest")->get_if<std::string>(), *entry.find("tail")->get_if<std::string>()});
    }
  }
  return files;
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

  const uint64_t bytes = agree(each([&] {
    check_request(request);
    return announcement(request);
  }));
  const std::vector<Value> prepared = each([&]() -> Value { return first ? prepare(storage, request, bytes) : ""; });
  const std::string save_id = *prepared[0].get_if<std::string>();
  const std::string folder = temporary_folder(request.path, partial_name(request.tag), save_id);

  Manifest manifest = request.manifest;
  manifest.tag = request.tag;
  manifest.save_id = save_id;
  bool answered = false;  // all have stopped writing: the folder can be removed
  try {
    manifest.files =
        files_of(each([&] { return write_files(storage, request.files, folder, save_id, request.progress); }));
    answered = true;
    const std::vector<Value> committed = each([&]() -> Value {
      if (!first) return None{};
      manifest.time = seconds_now();
      return commit(storage, request, folder, manifest);
    });
    SaveResult result{.folder = join(request.path, partial_name(request.tag))};
    for (const ManifestFile& file : manifest.files) result.bytes += file.size;
    result.pruned = texts(*committed[0].find("pruned"));
    result.warnings = texts(*committed[0].find("warnings"));
    return result;
  } catch (const Error& e) {
    // A rank that gave no answer may still be writing; then the next save sweeps.
    const bool silent = e.kind() == ErrorKind::kTimeout || e.kind() == ErrorKind::kPeer;
    if (first && (answered || !silent)) {
      try {
        remove_tree(storage, folder);
      } catch (const Error&) {  // the next save sweeps
      }
    }
    throw;
  }
}

Manifest write_partial(Storage& storage, const std::string& folder, Manifest manifest,
                       const std::vector<SaveFile>& files) {
  manifest.save_id = make_save_id();
  manifest.files = files_of({write_files(storage, files, folder, manifest.save_id, {})});
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
