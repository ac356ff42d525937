#include "cli/prune.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "checkpoint/commit.h"

namespace shardsmith::cli {
namespace {

uint64_t tree_bytes(Storage& storage, const std::string& path) {
  const Stat stat = storage.stat(path);
  if (!stat.exists || !stat.is_directory) return stat.size;
  uint64_t bytes = 0;
  for (const auto& name : storage.list(path)) bytes += tree_bytes(storage, join(path, name));
  return bytes;
}

// The checkpoints that `keep` means, by name.
std::set<std::string> named(const std::vector<Found>& all, const std::vector<std::string>& keep,
                            const std::string& path) {
  std::set<std::string> names;
  for (const auto& word : keep) {
    const auto is_meant = [&](const Found& found) {
      return found.name == word || found.name == partial_name(word) || (found.manifest && found.manifest->tag == word);
    };
    const auto found = std::find_if(all.begin(), all.end(), is_meant);
    if (found == all.end()) {
      std::vector<std::string> tags;
      for (const Found& one : all) tags.push_back(one.manifest ? one.manifest->tag : one.name);
      const std::string near = nearest(word, tags);
      fail(ErrorKind::kInvalidArgument, "prune: --keep ", word, ": ", path, " holds no such checkpoint",
           near.empty() ? str(" (shardsmith ls ", path, ")") : str("; did you mean ", near, "?"));
    }
    for (const Found& one : all) {
      if (is_meant(one)) names.insert(one.name);
    }
  }
  return names;
}

void check(const PruneOptions& options) {
  if (!options.keep_last && !options.keep_every && options.keep.empty() && !options.incomplete) {
    fail(ErrorKind::kInvalidArgument, "prune: what is to be kept? (--keep-last N, --keep-every N, --keep TAG)");
  }
  if (options.keep_last && *options.keep_last < 1) {
    fail(ErrorKind::kInvalidArgument, "prune: --keep-last is ", *options.keep_last,
         "; the newest always stays: 1 or more");
  }
  if (options.keep_every && *options.keep_every < 1) {
    fail(ErrorKind::kInvalidArgument, "prune: --keep-every is ", *options.keep_every, ", it can be 1 or more");
  }
}

}  // namespace

uint64_t PrunePlan::bytes() const {
  uint64_t sum = 0;
  for (const Pruned& one : gone) sum += one.bytes;
  return sum;
}

PrunePlan plan_prune(Storage& storage, const std::string& path, const PruneOptions& options) {
  check(options);
  std::vector<Found> all = scan(storage, path);  // newest first
  std::erase_if(all, [](const Found& found) { return found.kind != CheckpointKind::kPartial; });
  const std::set<std::string> keep = named(all, options.keep, path);
  // Only --incomplete: complete ones are none of its business.
  const bool complete_too = options.keep_last || options.keep_every || !options.keep.empty();
  PrunePlan plan;
  int64_t number = 0;
  for (const Found& found : all) {
    const auto stays = [&](const std::string& why) { plan.kept.push_back({found.name, why}); };
    const auto alone = [&](const std::string& why) { plan.left_alone.push_back({found.name, why}); };
    const auto goes = [&] {
      plan.gone.push_back(
          {found.name, found.manifest->step, tree_bytes(storage, found.folder), found.manifest->save_id});
    };
    const bool own_name = found.folder == join(path, found.name);
    if (!found.complete) {
      if (!found.manifest || !own_name || !options.incomplete)
        alone("incomplete: " + found.why_not);
      else if (found.newest)
        alone(str(kNewestName, " names it, though it is incomplete: ", found.why_not));
      else if (keep.count(found.name))
        stays("named by --keep");
      else
        goes();
      continue;
    }
    const int64_t place = number++;
    if (place == 0)
      stays("the newest");
    else if (found.newest)
      stays(str(kNewestName, " names it"));
    else if (keep.count(found.name))
      stays("named by --keep");
    else if (options.keep_last && place < *options.keep_last)
      stays(str("among the newest ", *options.keep_last));
    else if (options.keep_every && found.manifest->step % *options.keep_every == 0)
      stays(str("step ", found.manifest->step, " is a multiple of ", *options.keep_every));
    else if (!own_name)
      alone(str("in ", base_name(found.folder), ", left by a save that died; the next save puts it back"));
    else if (!complete_too)
      stays("complete");
    else
      goes();
  }
  return plan;
}

std::vector<Pruned> run_plan(Storage& storage, const std::string& path, const PrunePlan& plan) {
  const std::string newest = read_newest(storage, path);
  std::vector<Pruned> removed;
  std::vector<std::string> names;
  for (const Pruned& one : plan.gone) {
    const FolderState now = look_at(storage, join(path, one.name));
    const bool same = now.manifest && now.manifest->save_id == one.save_id;
    if (!same || newest == one.name || partial_name(newest) == one.name) continue;
    removed.push_back(one);
    names.push_back(one.name);
  }
  remove_checkpoints(storage, path, names);
  return removed;
}

}  // namespace shardsmith::cli
