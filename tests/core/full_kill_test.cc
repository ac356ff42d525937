// The machine dies at every call of a full save that changes something, with one, two and three writers of the one
// file; afterwards the folder holds the old or the new state, whole, and the next save leaves nothing of the dead one.
#include <gtest/gtest.h>
#include <iostream>

#include "memory_storage.h"
#include "scenarios.h"

namespace shardsmith {
namespace {

TEST(FullKill, AtEveryCallOfASaveWithOneToThreeWriters) {
  Points sample(3);
  int points = 0;
  for (const int ranks : {1, 2, 3}) {
    for (const FullScenario& scenario : FullScenario::all(ranks)) {
      const Prepared<FullScenario> prepared(scenario);
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
            scenario.save_on(faulty, folder_of(folder));
          });
          ASSERT_EQ(code, 137);
          ++points;
          scenario.expect_recovers(unsynced_files(), folder_of(folder));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
  std::cout << "kill points of full saves: " << points << "\n";
  RecordProperty("kill_points", points);
}

TEST(FullKill, PowerIsCutAtEveryCall) {
  Points sample(3);
  int points = 0;
  for (const int ranks : {1, 2}) {
    for (const FullScenario& scenario : FullScenario::all(ranks)) {
      const std::string path = "runs/out";
      for (int trial = 0; trial < 3; ++trial) {
        for (int64_t at = sample.first();; at += sample.step) {
          SCOPED_TRACE(str(scenario.name, ", ", ranks, " ranks, power cut at ", at, ", trial ", trial));
          std::mt19937 random(static_cast<unsigned>(at * 10 + trial));
          MemoryStorage storage;
          scenario.prepare(storage, path);
          storage.cut_power_at(at);
          const SaveOutcome outcome = scenario.save_on(storage, path);
          const bool finished = !outcome.power_cut;
          storage.reboot(trial == 0 ? nullptr : &random);
          // A save that has returned is durable.
          scenario.expect_recovers(storage, path, finished ? 2 : 0);
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
  Points sample(3);
  int points = 0, failed = 0, warned = 0;
  for (const int ranks : {1, 2, 3}) {
    for (const FullScenario& scenario : FullScenario::all(ranks)) {
      const Prepared<FullScenario> prepared(scenario);
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
          const SaveOutcome outcome = scenario.save_on(faulty, path);
          ++points;
          if (outcome.succeeded()) {
            warned += outcome.results[0]->warnings.empty() ? 0 : 1;
            scenario.expect_recovers(unsynced_files(), path, 2);
          } else {
            ++failed;
            for (const auto& error : outcome.errors) {
              ASSERT_TRUE(error);
              EXPECT_EQ(error->kind(), ErrorKind::kIo);
              EXPECT_STREQ(error->what(), outcome.errors[0]->what());
              const std::string text = error->what();
              EXPECT_NE(text.find(kind == Fault::Kind::kNoSpace ? "ENOSPC" : "EIO"), std::string::npos) << text;
            }
            scenario.expect_recovers(unsynced_files(), path, 1);
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
