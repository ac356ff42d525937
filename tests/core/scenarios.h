// What the campaigns do: kinds of saves that die, and what must be there afterwards.
//
// A scenario has: `ranks`; prepare(), the saves before; save_on(), the save that dies, by ranks that are threads;
// of_rank() and save_as(), the same by one rank; expect_recovers(): the old or the new state is there, whole, and a
// next save goes through and leaves nothing of the dead one. `must`: 0 either, 1 old, 2 new.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "full_fixture.h"
#include "storage/faulty_storage.h"
#include "unsynced_storage.h"

namespace shardsmith {

inline std::string folder_of(const QuickFolder& folder) { return join(folder.path(), "out"); }

// A scenario's folder as it is before the save that dies; saved once and copied for each point.
template <typename Scenario>
class Prepared {
 public:
  explicit Prepared(const Scenario& scenario) { scenario.prepare(unsynced_files(), folder_of(folder_)); }
  void copy_to(const std::string& path) const {
    if (!std::filesystem::exists(folder_of(folder_))) return;  // nothing before a first save
    std::filesystem::copy(folder_of(folder_), path, std::filesystem::copy_options::recursive);
  }

 private:
  QuickFolder folder_;
};

// The changing calls of the save that is to die.
template <typename Scenario>
std::vector<std::string> calls_of(const Scenario& scenario) {
  QuickFolder folder;
  scenario.prepare(unsynced_files(), folder_of(folder));
  FaultyStorage counting(unsynced_files());
  EXPECT_TRUE(scenario.save_on(counting, folder_of(folder)).succeeded());
  return counting.log();
}

// Every point in the long tests, else every `usual`-th, beginning with another one in each scenario.
struct Points {
  explicit Points(int64_t usual) : step(std::getenv("SHARDSMITH_LONG") ? 1 : usual) {}
  const int64_t step;
  int64_t scenario = 0;
  int64_t first() { return scenario++ % step; }
};

struct PartialScenario {
  std::string name;
  int ranks = 1;
  std::vector<TestState> before;  // saved already, oldest first
  TestState saved;                // the save that dies
  int keep = -1;
  bool exchange = true;

  static std::vector<PartialScenario> all(int ranks) {
    const TestState first{"a", 1, ranks}, second{"b", 2, ranks}, third{"c", 3, ranks}, again{"b", 4, ranks};
    return {
        {"a first save", ranks, {}, first},
        {"a second save", ranks, {first}, second},
        {"an overwrite by exchange", ranks, {first, second}, again},
        {"an overwrite by .old", ranks, {first, second}, again, -1, false},
        {"retention", ranks, {first, second}, third, 1},
        {"an overwrite with retention by .old", ranks, {first, second}, again, 1, false},
    };
  }
  void prepare(Storage& storage, const std::string& path) const {
    for (const TestState& state : before) ASSERT_TRUE(save(storage, state, path).succeeded());
  }
  SaveOutcome save_on(Storage& storage, const std::string& path) const {
    const auto with_keep = [&](int, SaveRequest& request) { request.num_kept_partial_checkpoints = keep; };
    if (exchange) return save(storage, saved, path, with_keep);
    FaultyStorage without(storage, {Fault::Kind::kNoExchange});
    return save(without, saved, path, with_keep);
  }
  std::unique_ptr<RankFiles> of_rank(int rank, const std::string& path) const {
    auto files = std::make_unique<RankFiles>(saved, rank, path);
    files->request.num_kept_partial_checkpoints = keep;
    return files;
  }
  static SaveResult save_as(Storage& storage, Peers& peers, Transport&, const SaveRequest& request) {
    return save_partial(storage, peers, request);
  }
  void expect_recovers(Storage& storage, const std::string& path, int must = 0) const {
    std::optional<Found> found;
    if (storage.stat(path).exists) found = find_checkpoint(storage, path, "", nullptr);
    const bool is_new = found && found->manifest->step == saved.step;
    if (must == 2) {
      ASSERT_TRUE(is_new);
    }
    if (must == 1) {
      ASSERT_FALSE(is_new);
    }
    if (is_new) {
      expect_whole(storage, *found, saved);
    } else if (before.empty()) {
      ASSERT_FALSE(found);
    } else {
      ASSERT_TRUE(found);
      expect_whole(storage, *found, before.back());
    }
    // Whatever counts as complete is whole.
    if (storage.stat(path).exists) {
      for (const Found& any : scan(storage, path)) {
        if (!any.complete) continue;
        EXPECT_EQ(verify_partial(storage, any.folder, *any.manifest), std::vector<std::string>{});
      }
    }
    const std::string kept = found ? found->name : "";
    TestState next{"next", 9, ranks};
    const SaveOutcome outcome = save(storage, next, path);
    ASSERT_TRUE(outcome.succeeded());
    EXPECT_TRUE(outcome.results[0]->warnings.empty());
    EXPECT_EQ(leftovers(storage, path), std::vector<std::string>{});
    const auto now = find_checkpoint(storage, path, "", nullptr);
    ASSERT_TRUE(now);
    expect_whole(storage, *now, next);
    if (!kept.empty()) {
      const auto still = find_checkpoint(storage, path, kept, nullptr);
      ASSERT_TRUE(still) << kept << " is lost";
      expect_whole(storage, *still, is_new ? saved : before.back());
    }
  }
};

struct FullScenario {
  std::string name;
  std::vector<FullState> before;     // saved already, oldest first
  std::optional<TestState> partial;  // saved before them
  FullState saved;                   // the save that dies
  std::optional<int> keep;
  int ranks = 1;
  bool exchange = true;

  static std::vector<FullScenario> all(int ranks) {
    const FullState plain{"m", 1, ranks, false}, with{"m", 2, ranks, true}, again{"m", 3, ranks, true};
    const TestState partial{"p", 1, ranks};
    std::vector<FullScenario> all = {
        {"a first save", {}, {}, plain, {}},
        {"a first save with companions", {}, {}, with, {}},
        {"an overwrite that brings companions", {plain}, {}, with, {}},
        {"an overwrite with companions", {with}, {}, again, {}},
        {"an overwrite that loses companions", {with}, {}, FullState{"m", 3, ranks, false}, {}},
        {"beside others, with retention", {with}, partial, FullState{"n", 3, ranks, true}, 0},
    };
    for (FullScenario& scenario : all) scenario.ranks = ranks;
    return all;
  }
  void prepare(Storage& storage, const std::string& path) const {
    if (partial) {
      ASSERT_TRUE(save(storage, *partial, path).succeeded());
    }
    for (const FullState& state : before) {
      ASSERT_TRUE(save_whole(storage, state, path).succeeded());
    }
  }
  SaveOutcome save_on(Storage& storage, const std::string& path) const {
    return save_whole(storage, saved, path,
                      [&](int, FullRequest& request) { request.num_kept_partial_checkpoints = keep; });
  }
  std::unique_ptr<RankFull> of_rank(int rank, const std::string& path) const {
    auto full = std::make_unique<RankFull>(saved, rank, path);
    full->request.num_kept_partial_checkpoints = keep;
    return full;
  }
  static SaveResult save_as(Storage& storage, Peers& peers, Transport& transport, const FullRequest& request) {
    return save_full(storage, peers, &transport, request);
  }
  void expect_recovers(Storage& storage, const std::string& path, int must = 0) const {
    const auto find = [&](const std::string& tag) -> std::optional<Found> {
      if (!storage.stat(path).exists) return std::nullopt;
      return find_checkpoint(storage, path, tag, nullptr, CheckpointKind::kFull);
    };
    const std::optional<Found> found = find(saved.tag);
    const bool is_new = found && found->manifest->step == saved.step;
    if (must == 2) {
      ASSERT_TRUE(is_new);
    }
    if (must == 1) {
      ASSERT_FALSE(is_new);
    }
    const FullState* old = nullptr;
    for (const FullState& state : before)
      if (state.tag == saved.tag) old = &state;
    if (is_new) {
      expect_whole(storage, *found, saved);
    } else if (old) {
      ASSERT_TRUE(found) << "the old one is lost";
      expect_whole(storage, *found, *old);
    } else {
      ASSERT_FALSE(found);
    }
    // The rest is as it was, and something to go on from is found without a tag.
    for (const FullState& state : before) {
      if (state.tag == saved.tag) continue;
      ASSERT_TRUE(find(state.tag));
      expect_whole(storage, *find(state.tag), state);
    }
    if (!before.empty()) {
      ASSERT_TRUE(find(""));
    }
    if (partial) {
      const auto found_partial = find_checkpoint(storage, path, "", nullptr);
      ASSERT_TRUE(found_partial);
      expect_whole(storage, *found_partial, *partial);
    }
    // Whatever counts as complete is whole.
    if (storage.stat(path).exists) {
      for (const Found& any : scan(storage, path)) {
        if (any.complete && any.kind == CheckpointKind::kFull) read_full(storage, any.folder, nullptr);
      }
    }
    const FullState next{saved.tag, 9, saved.ranks, false};
    const SaveOutcome outcome = save_whole(storage, next, path);
    ASSERT_TRUE(outcome.succeeded());
    EXPECT_TRUE(outcome.results[0]->warnings.empty());
    EXPECT_EQ(leftovers(storage, path), std::vector<std::string>{});
    expect_whole(storage, *find(""), next);
    // No companion of a checkpoint that isn't there.
    std::vector<std::string> expected;
    for (const Found& any : scan(storage, path)) {
      expected.push_back(any.name);
      if (any.kind == CheckpointKind::kFull)
        for (const ManifestFile& file : any.manifest->files) expected.push_back(file.name);
    }
    expected.push_back(kNewestName);
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(storage.list(path), expected);
  }
};

// `ranks` replicas of one stage that is large enough for several writers: model and optimizer are shared, the random
// state is each rank's own.
struct Replicas {
  std::string tag;
  int64_t step = 0;
  int ranks = 2;
  Shape shape = {300, 1000};

  TestState alike() const { return {tag, step, 1, shape}; }
  // For rank `rank`, who has it all.
  std::unique_ptr<RankFiles> files(int rank, const std::string& path) const {
    auto result = std::make_unique<RankFiles>(alike(), 0, path);
    SaveRequest& request = result->request;
    request.manifest.world_size = request.manifest.rdp = ranks;
    request.manifest.pp = 1;
    request.files[0].shared = request.files[1].shared = true;
    request.files[2].name = "rng_" + std::to_string(rank) + ".pt";
    if (rank > 0) request.files.pop_back();  // the user's content is rank 0's
    return result;
  }
};

inline SaveOutcome save_together(Storage& storage, const Replicas& state, const std::string& path,
                                 const std::function<void(int rank, SaveRequest&)>& change = {}) {
  std::vector<std::unique_ptr<RankFiles>> files;
  for (int r = 0; r < state.ranks; ++r) {
    files.push_back(state.files(r, path));
    if (change) change(r, files.back()->request);
  }
  return on_threads(state.ranks, [&](int rank, Peers& peers) {
    return save_partial(storage, peers, files[static_cast<size_t>(rank)]->request);
  });
}

// Files that all ranks hold alike and write together.
struct ReplicaScenario {
  std::string name;
  std::vector<Replicas> before;
  Replicas saved;
  int ranks = 1;
  bool exchange = true;

  static std::vector<ReplicaScenario> all(int ranks) {
    const Replicas first{"a", 1, ranks}, again{"a", 2, ranks};
    return {{"a first save", {}, first, ranks}, {"an overwrite", {first}, again, ranks}};
  }
  void prepare(Storage& storage, const std::string& path) const {
    for (const Replicas& state : before) ASSERT_TRUE(save_together(storage, state, path).succeeded());
  }
  SaveOutcome save_on(Storage& storage, const std::string& path) const { return save_together(storage, saved, path); }
  std::unique_ptr<RankFiles> of_rank(int rank, const std::string& path) const { return saved.files(rank, path); }
  static SaveResult save_as(Storage& storage, Peers& peers, Transport&, const SaveRequest& request) {
    return save_partial(storage, peers, request);
  }
  void expect_recovers(Storage& storage, const std::string& path, int must = 0) const {
    std::optional<Found> found;
    if (storage.stat(path).exists) found = find_checkpoint(storage, path, "", nullptr);
    const bool is_new = found && found->manifest->step == saved.step;
    ASSERT_TRUE(must != 2 || is_new);
    ASSERT_TRUE(must != 1 || !is_new);
    ASSERT_EQ(found.has_value(), is_new || !before.empty());
    if (found) expect_whole(storage, *found, (is_new ? saved : before.back()).alike());
    const Replicas next{"next", 9, saved.ranks};
    ASSERT_TRUE(save_together(storage, next, path).succeeded());
    EXPECT_EQ(leftovers(storage, path), std::vector<std::string>{});
    expect_whole(storage, *find_checkpoint(storage, path, "", nullptr), next.alike());
  }
};

}  // namespace shardsmith
