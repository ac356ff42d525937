// The machine dies at every call of a full save that changes something, with one, two and three writers of the one
// file; afterwards the folder holds the old or the new state, whole, and the next save leaves nothing of the dead one.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>

#include "full_fixture.h"
#include "memory_storage.h"
#include "storage/faulty_storage.h"
#include "unsynced_storage.h"

namespace shardsmith {
namespace {

struct Scenario {
  std::string name;
  std::vector<FullState> before;     // saved already, oldest first
  std::optional<TestState> partial;  // saved before them
  FullState saved;                   // the save that dies
  std::optional<int> keep;
};

std::vector<Scenario> scenarios(int ranks) {
  const FullState plain{"m", 1, ranks, false}, with{"m", 2, ranks, true}, again{"m", 3, ranks, true};
  const TestState partial{"p", 1, ranks};
  return {
      {"a first save", {}, {}, plain, {}},
      {"a first save with companions", {}, {}, with, {}},
      {"an overwrite that brings companions", {plain}, {}, with, {}},
      {"an overwrite with companions", {with}, {}, again, {}},
      {"an overwrite that loses companions", {with}, {}, FullState{"m", 3, ranks, false}, {}},
      {"beside others, with retention", {with}, partial, FullState{"n", 3, ranks, true}, 0},
  };
}

std::string folder_of(const QuickFolder& folder) { return join(folder.path(), "out"); }

void prepare(Storage& storage, const Scenario& scenario, const std::string& path) {
  if (scenario.partial) {
    ASSERT_TRUE(save(storage, *scenario.partial, path).succeeded());
  }
  for (const FullState& state : scenario.before) {
    ASSERT_TRUE(save_whole(storage, state, path).succeeded());
  }
}

SaveOutcome save_on(Storage& storage, const Scenario& scenario, const std::string& path) {
  return save_whole(storage, scenario.saved, path,
                    [&](int, FullRequest& request) { request.num_kept_partial_checkpoints = scenario.keep; });
}

// Old or new, whole; then a next save, after which nothing is left of the dead one. `must`: 0 either, 1 old, 2 new.
void expect_recovers(Storage& storage, const Scenario& scenario, const std::string& path, int must = 0) {
  const auto find = [&](const std::string& tag) -> std::optional<Found> {
    if (!storage.stat(path).exists) return std::nullopt;
    return find_checkpoint(storage, path, tag, nullptr, CheckpointKind::kFull);
  };
  const std::optional<Found> found = find(scenario.saved.tag);
  const bool is_new = found && found->manifest->step == scenario.saved.step;
  if (must == 2) {
    ASSERT_TRUE(is_new);
  }
  if (must == 1) {
    ASSERT_FALSE(is_new);
  }
  const FullState* old = nullptr;
  for (const FullState& state : scenario.before)
    if (state.tag == scenario.saved.tag) old = &state;
  if (is_new) {
    expect_whole(storage, *found, scenario.saved);
  } else if (old) {
    ASSERT_TRUE(found) << "the old one is lost";
    expect_whole(storage, *found, *old);
  } else {
    ASSERT_FALSE(found);
  }
  // The rest is as it was, and something to go on from is found without a tag.
  for (const FullState& state : scenario.before) {
    if (state.tag == scenario.saved.tag) continue;
    ASSERT_TRUE(find(state.tag));
    expect_whole(storage, *find(state.tag), state);
  }
  if (!scenario.before.empty()) {
    ASSERT_TRUE(find(""));
  }
  if (scenario.partial) {
    const auto partial = find_checkpoint(storage, path, "", nullptr);
    ASSERT_TRUE(partial);
    expect_whole(storage, *partial, *scenario.partial);
  }
  // Whatever counts as complete is whole.
  if (storage.stat(path).exists) {
    for (const Found& any : scan(storage, path)) {
      if (any.complete && any.kind == CheckpointKind::kFull) read_full(storage, any.folder, nullptr);
    }
  }
  const FullState next{scenario.saved.tag, 9, scenario.saved.ranks, false};
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

// A scenario's folder as it is before the save that dies; saved once and copied for each point.
class Prepared {
 public:
  explicit Prepared(const Scenario& scenario) { prepare(unsynced_files(), scenario, folder_of(folder_)); }
  void copy_to(const std::string& path) const {
    if (!std::filesystem::exists(folder_of(folder_))) return;  // nothing before a first save
    std::filesystem::copy(folder_of(folder_), path, std::filesystem::copy_options::recursive);
  }

 private:
  QuickFolder folder_;
};

std::vector<std::string> calls_of(const Scenario& scenario) {
  QuickFolder folder;
  prepare(unsynced_files(), scenario, folder_of(folder));
  FaultyStorage counting(unsynced_files());
  EXPECT_TRUE(save_on(counting, scenario, folder_of(folder)).succeeded());
  return counting.log();
}

// Every point in the long tests, else every third, beginning with another one in each scenario.
struct Points {
  const int64_t step = std::getenv("SHARDSMITH_LONG") ? 1 : 3;
  int64_t scenario = 0;
  int64_t first() { return scenario++ % step; }
};

TEST(FullKill, AtEveryCallOfASaveWithOneToThreeWriters) {
  Points sample;
  int points = 0;
  for (const int ranks : {1, 2, 3}) {
    for (const Scenario& scenario : scenarios(ranks)) {
      const Prepared prepared(scenario);
      const std::vector<std::string> log = calls_of(scenario);
      ASSERT_GT(log.size(), 10u);
      for (int64_t at = sample.first(); at < static_cast<int64_t>(log.size()); at += sample.step) {
        for (const Fault::Kind kind : {Fault::Kind::kKill, Fault::Kind::kKillHalf}) {
          // (With several ranks the order of calls may be another one this time; then this is one more plain kill.)
          if (kind == Fault::Kind::kKillHalf && log[static_cast<size_t>(at)] != "write") continue;
          SCOPED_TRACE(str(scenario.name, ", ", ranks, " ranks, killed at ", at, " ", log[static_cast<size_t>(at)]));
          QuickFolder folder;
          prepared.copy_to(folder_of(folder));
          const int code = in_child([&] {
            FaultyStorage faulty(unsynced_files(), {kind, at});
            save_on(faulty, scenario, folder_of(folder));
          });
          ASSERT_EQ(code, 137);
          ++points;
          expect_recovers(unsynced_files(), scenario, folder_of(folder));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
  std::cout << "kill points of full saves: " << points << "\n";
  RecordProperty("kill_points", points);
}

TEST(FullKill, PowerIsCutAtEveryCall) {
  Points sample;
  int points = 0;
  for (const int ranks : {1, 2}) {
    for (const Scenario& scenario : scenarios(ranks)) {
      const std::string path = "runs/out";
      for (int trial = 0; trial < 3; ++trial) {
        for (int64_t at = sample.first();; at += sample.step) {
          SCOPED_TRACE(str(scenario.name, ", ", ranks, " ranks, power cut at ", at, ", trial ", trial));
          std::mt19937 random(static_cast<unsigned>(at * 10 + trial));
          MemoryStorage storage;
          prepare(storage, scenario, path);
          storage.cut_power_at(at);
          const SaveOutcome outcome = save_on(storage, scenario, path);
          const bool finished = !outcome.power_cut;
          storage.reboot(trial == 0 ? nullptr : &random);
          // A save that has returned is durable.
          expect_recovers(storage, scenario, path, finished ? 2 : 0);
          if (HasFatalFailure()) return;
          if (finished) {
            EXPECT_TRUE(outcome.succeeded());
            break;
          }
          ++points;
        }
      }
    }
  }
  std::cout << "power cut points of full saves: " << points << "\n";
}

// An error of the storage, at every call: all ranks say the same, the old state stays, and nothing is left after the
// next save. Errors of tidying up come after the commit and are warnings.
TEST(FullKill, EveryCallMayFail) {
  Points sample;
  int points = 0, failed = 0, warned = 0;
  for (const int ranks : {1, 2, 3}) {
    for (const Scenario& scenario : scenarios(ranks)) {
      const Prepared prepared(scenario);
      const std::vector<std::string> log = calls_of(scenario);
      for (const Fault::Kind kind : {Fault::Kind::kIoError, Fault::Kind::kNoSpace, Fault::Kind::kSyncFails}) {
        for (int64_t at = sample.first(); at < static_cast<int64_t>(log.size()); at += sample.step) {
          // Where no call is an fsync, it is the next fsync that fails: tried already.
          if (kind == Fault::Kind::kSyncFails && !log[static_cast<size_t>(at)].starts_with("sync")) continue;
          SCOPED_TRACE(str(scenario.name, ", ", ranks, " ranks, fault ", static_cast<int>(kind), " at ", at));
          QuickFolder folder;
          const std::string path = folder_of(folder);
          prepared.copy_to(path);
          FaultyStorage faulty(unsynced_files(), {kind, at});
          const SaveOutcome outcome = save_on(faulty, scenario, path);
          ++points;
          if (outcome.succeeded()) {
            warned += outcome.results[0]->warnings.empty() ? 0 : 1;
            expect_recovers(unsynced_files(), scenario, path, 2);
          } else {
            ++failed;
            for (const auto& error : outcome.errors) {
              ASSERT_TRUE(error);
              EXPECT_EQ(error->kind(), ErrorKind::kIo);
              EXPECT_STREQ(error->what(), outcome.errors[0]->what());
              const std::string text = error->what();
              EXPECT_NE(text.find(kind == Fault::Kind::kNoSpace ? "ENOSPC" : "EIO"), std::string::npos) << text;
            }
            expect_recovers(unsynced_files(), scenario, path, 1);
          }
          if (HasFatalFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(failed, 90);
  EXPECT_GT(warned, 5);
  std::cout << "fault points of full saves: " << points << ", of them " << failed << " failed the save and " << warned
            << " only warned\n";
}

}  // namespace
}  // namespace shardsmith
