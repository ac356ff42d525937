// Looking for checkpoints: scan and find_checkpoint.
#include <algorithm>
#include <set>

#include "base/error.h"
#include "checkpoint/commit.h"
#include "checkpoint/full.h"
#include "checkpoint/load.h"
#include "format/pt.h"

namespace shardsmith {
namespace {

constexpr std::string_view kPartialSuffix = "_partial";

// As look_at, but a scan goes on past what can't be read.
FolderState look_at_tolerantly(Storage& storage, const std::string& folder) {
  try {
    return look_at(storage, folder);
  } catch (const Error& e) {
    return {Completeness::kIncomplete, e.what(), std::nullopt};
  }
}

Found found_from(const std::string& folder, const std::string& name, FolderState state) {
  Found found{.folder = folder, .name = name};
  found.complete = state.completeness == Completeness::kComplete;
  found.why_not = std::move(state.why);
  found.manifest = std::move(state.manifest);
  if (found.manifest) {
    for (const ManifestFile& file : found.manifest->files) found.bytes += file.size;
  }
  return found;
}

// Names of files in `path` that are, or may have been, the weights of a full checkpoint: those of ours, and what `.old`
// holds.
std::set<std::string> full_names_in(Storage& storage, const std::string& path) {
  std::set<std::string> names;
  for (const std::string& entry : storage.list(path)) {
    const std::string_view view = entry;
    try {
      if (view.starts_with('.')) {
        if (!view.ends_with(".old") || view.ends_with("_partial.old") || view.size() < 6) continue;
        const std::string name = entry.substr(1, entry.size() - 5), weights = join(join(path, entry), name);
        if (is_full(storage, weights)) names.insert(name);
        continue;
      }
      const Stat stat = storage.stat(join(path, entry));
      if (!stat.exists || stat.is_directory || stat.is_link) continue;
      if (is_pt(storage, join(path, entry)) && is_full(storage, join(path, entry))) names.insert(entry);
    } catch (const Error&) {  // nothing that can be read: no checkpoint
    }
  }
  return names;
}

FolderState look_at_full_tolerantly(Storage& storage, const std::string& path) {
  try {
    return look_at_full(storage, path);
  } catch (const Error& e) {
    return {Completeness::kIncomplete, e.what(), std::nullopt};
  }
}

std::optional<Found> full_found(Storage& storage, const std::string& path, const std::string& name) {
  std::string weights = join(path, name);
  FolderState state = look_at_full_tolerantly(storage, weights);
  if (state.completeness != Completeness::kComplete) {
    const std::string old = join(old_folder(path, name), name);
    FolderState before = look_at_full_tolerantly(storage, old);
    if (before.completeness == Completeness::kComplete ||
        (state.completeness == Completeness::kAbsent && before.completeness != Completeness::kAbsent))
      weights = old, state = std::move(before);
  }
  if (state.completeness == Completeness::kAbsent) return std::nullopt;  // has vanished meanwhile
  Found found{.kind = CheckpointKind::kFull, .folder = weights, .name = name};
  found.complete = state.completeness == Completeness::kComplete;
  found.why_not = std::move(state.why);
  found.manifest = std::move(state.manifest);
  if (found.manifest) {
    found.bytes = storage.stat(weights).size;
    for (const ManifestFile& file : found.manifest->files) found.bytes += file.size;
  }
  return found;
}

// Names of checkpoints that stand in `path`, under their own name or as `.old`.
std::set<std::string> names_in(Storage& storage, const std::string& path) {
  std::set<std::string> names;
  for (const std::string& entry : storage.list(path)) {
    const std::string_view view = entry;
    if (view.starts_with('.')) {
      const std::string old = std::string(kPartialSuffix) + ".old";
      if (view.ends_with(old) && view.size() > old.size() + 1) names.insert(entry.substr(1, entry.size() - 5));
      continue;
    }
    const std::string folder = join(path, entry);
    if (!storage.stat(folder).is_directory) continue;
    if (view.ends_with(kPartialSuffix) || storage.stat(join(folder, kManifestName)).exists) names.insert(entry);
  }
  return names;
}

}  // namespace

std::vector<Found> scan(Storage& storage, const std::string& path) {
  const Stat stat = storage.stat(path);
  if (!stat.exists) fail(ErrorKind::kNotFound, path, " is not there");
  const std::string newest = read_newest(storage, path);
  std::vector<Found> all;
  for (const std::string& name : names_in(storage, path)) {
    const std::string folder = join(path, name), old = old_folder(path, name);
    FolderState state = look_at_tolerantly(storage, folder);
    Found found;
    if (state.completeness != Completeness::kComplete && storage.stat(old).is_directory) {
      FolderState before = look_at_tolerantly(storage, old);
      const bool serves = before.completeness == Completeness::kComplete ||
                          (state.completeness == Completeness::kAbsent && before.completeness != Completeness::kAbsent);
      found = serves ? found_from(old, name, std::move(before)) : found_from(folder, name, std::move(state));
    } else {
      if (state.completeness == Completeness::kAbsent) continue;  // has vanished meanwhile
      found = found_from(folder, name, std::move(state));
    }
    all.push_back(std::move(found));
  }
  for (const std::string& name : full_names_in(storage, path))
    if (std::optional<Found> found = full_found(storage, path, name)) all.push_back(std::move(*found));
  // The pointer holds a name; where there is none of it, a tag.
  const bool named = std::any_of(all.begin(), all.end(), [&](const Found& found) { return found.name == newest; });
  for (Found& found : all) found.newest = !newest.empty() && found.name == (named ? newest : partial_name(newest));
  std::stable_sort(all.begin(), all.end(), [](const Found& a, const Found& b) {
    if (a.manifest.has_value() != b.manifest.has_value()) return a.manifest.has_value();
    if (!a.manifest) return false;
    if (a.manifest->step != b.manifest->step) return a.manifest->step > b.manifest->step;
    return a.manifest->time > b.manifest->time;
  });
  return all;
}

void put_abandoned_last(std::vector<Found>& found, int64_t last_step) {
  std::stable_partition(found.begin(), found.end(),
                        [&](const Found& f) { return !f.manifest || f.manifest->step <= last_step; });
}

std::optional<Found> find_checkpoint(Storage& storage, const std::string& path, const std::string& tag,
                                     std::vector<std::string>* passed_over, CheckpointKind kind) {
  const auto pass_over = [&](const std::string& text) {
    if (passed_over) passed_over->push_back(text);
  };
  std::vector<Found> all = scan(storage, path);
  const std::string newest = read_newest(storage, path);
  const bool newest_is_here =
      std::any_of(all.begin(), all.end(), [&](const Found& f) { return f.name == newest || f.newest; });
  const auto last = std::find_if(all.begin(), all.end(), [](const Found& f) { return f.newest; });
  if (last != all.end() && last->complete) put_abandoned_last(all, last->manifest->step);
  std::erase_if(all, [&](const Found& found) { return found.kind != kind; });
  const auto named = [&](const std::string& name) -> Found* {
    std::vector<std::string> candidates{name};
    if (kind == CheckpointKind::kPartial) candidates.insert(candidates.begin(), partial_name(name));
    for (const std::string& candidate : candidates) {
      for (Found& found : all) {
        if (found.name == candidate) return &found;
      }
    }
    return nullptr;
  };
  if (!tag.empty()) {
    Found* found = named(tag);
    if (found && found->complete) return std::move(*found);
    if (found) pass_over(found->name + ": " + found->why_not);
    return std::nullopt;
  }
  if (!newest.empty()) {
    const auto found = std::find_if(all.begin(), all.end(), [](const Found& f) { return f.newest; });
    if (found != all.end() && found->complete) return std::move(*found);
    if (!newest_is_here) pass_over(str(kNewestName, " names ", newest, ", which is not there"));
  }
  for (Found& found : all) {
    if (found.complete) return std::move(found);
    pass_over(found.name + ": " + found.why_not);
  }
  return std::nullopt;
}

}  // namespace shardsmith
