// The machine dies at every call that changes something; afterwards the folder holds the old or the new state, whole,
// and the next save goes through and leaves nothing of the dead one.
#include <gtest/gtest.h>
#include <iostream>

#include "memory_storage.h"
#include "scenarios.h"

namespace shardsmith {
namespace {

TEST(Kill, AtEveryCallOfASaveWithRanksAsThreads) {
  int points = 0;
  for (int ranks : {1, 2}) {
    for (const PartialScenario& scenario : PartialScenario::all(ranks)) {
      const Prepared<PartialScenario> prepared(scenario);
      const std::vector<std::string> log = calls_of(scenario);
      ASSERT_GT(log.size(), 10u);
      for (int64_t at = 0; at < static_cast<int64_t>(log.size()); ++at) {
        for (const Fault::Kind kind : {Fault::Kind::kKill, Fault::Kind::kKillHalf}) {
          // (With two ranks the order of calls may be another one this time; then this is one more plain kill.)
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
  std::cout << "kill points: " << points << " (threads)\n";
  RecordProperty("kill_points", points);
}

// What a kill leaves alone and a power cut does not: bytes and names that were never synced.
TEST(Kill, PowerIsCutAtEveryCall) {
  int points = 0;
  for (int ranks : {1, 2}) {
    for (const PartialScenario& scenario : PartialScenario::all(ranks)) {
      const std::string path = "runs/out";
      for (int trial = 0; trial < 4; ++trial) {
        for (int64_t at = 0;; ++at) {
          SCOPED_TRACE(str(scenario.name, ", ", ranks, " ranks, power cut at ", at, ", trial ", trial));
          std::mt19937 random(static_cast<unsigned>(at * 10 + trial));
          MemoryStorage storage(scenario.exchange);
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
  std::cout << "power cut points: " << points << "\n";
}

// An error of the storage, at every call: all ranks say the same, the old state stays, and nothing is left after the
// next save. Errors of tidying up come after the commit and are warnings.
TEST(Kill, EveryCallMayFail) {
  int points = 0, failed = 0, warned = 0;
  for (int ranks : {1, 2}) {
    for (const PartialScenario& scenario : PartialScenario::all(ranks)) {
      const Prepared<PartialScenario> prepared(scenario);
      const std::vector<std::string> log = calls_of(scenario);
      for (const Fault::Kind kind : {Fault::Kind::kIoError, Fault::Kind::kNoSpace, Fault::Kind::kSyncFails}) {
        for (int64_t at = 0; at < static_cast<int64_t>(log.size()); ++at) {
          // Where no call is an fsync, it is the next fsync that fails: tried already.
          if (kind == Fault::Kind::kSyncFails && !log[static_cast<size_t>(at)].starts_with("sync")) continue;
          SCOPED_TRACE(str(scenario.name, ", ", ranks, " ranks, fault ", static_cast<int>(kind), " at ", at));
          QuickFolder folder;
          const std::string path = folder_of(folder);
          prepared.copy_to(path);
          const std::string newest = read_newest(unsynced_files(), path);
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
              if (ranks > 1) {
                EXPECT_EQ(text.rfind(str("rank ", error->rank(), ": "), 0), 0u) << text;
              }
            }
            EXPECT_EQ(read_newest(unsynced_files(), path), newest);
            scenario.expect_recovers(unsynced_files(), path, 1);
          }
          if (HasFatalFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(failed, 100);
  EXPECT_GT(warned, 5);
  std::cout << "fault points: " << points << ", of them " << failed << " failed the save and " << warned
            << " only warned\n";
}

// Whatever order a disk keeps: `newest` gets a name only when all of that is durable, and nothing loses its content
// while what stands for it, or the loss of its name, is not.
class Watch final : public ForwardingStorage {
 public:
  Watch(MemoryStorage& memory, std::string path) : ForwardingStorage(memory), memory_(memory), path_(std::move(path)) {}
  void rename(const std::string& from, const std::string& to) override {
    if (to == join(path_, kNewestName)) {
      EXPECT_TRUE(memory_.has_durable_bytes(from)) << from << " is no durable pointer";
      std::string name = read_text(base, from);
      name.pop_back();
      expect_durable(name);
      ++pointers;
    } else if (parent(to) == path_ && base_name(parent(from)).starts_with(str(".", base_name(to), ".tmp-"))) {
      // A full checkpoint's weights, which stand for the rest.
      EXPECT_EQ(base.list(parent(from)), std::vector{base_name(from)}) << "the weights get their name before the rest";
    }
    base.rename(from, to);
  }
  void remove_file(const std::string& file) override {
    const std::string folder = base_name(parent(file));
    if (parent(parent(file)) == path_ && !folder.starts_with(".exchange-probe-")) {
      EXPECT_TRUE(folder.starts_with('.')) << file << " goes while its folder has a name";
      EXPECT_TRUE(memory_.has_durable_name(parent(file))) << folder << " may come back under its old name, half empty";
      expect_durable(read_newest(base, path_));
      ++removals;
    }
    base.remove_file(file);
  }
  int pointers = 0, removals = 0;

 private:
  void expect_durable(const std::string& name) {
    EXPECT_TRUE(memory_.is_durable(join(path_, name))) << name << " is not durable";
    for (const char* companion : {"user_content_", "optimizer_"}) {
      const std::string beside = join(path_, companion + name);
      EXPECT_TRUE(!base.stat(beside).exists || memory_.is_durable(beside)) << beside << " is not durable";
    }
  }
  MemoryStorage& memory_;
  std::string path_;
};

template <typename Scenario>
void watch(int& pointers, int& removals) {
  for (const int ranks : {1, 2}) {
    for (const Scenario& scenario : Scenario::all(ranks)) {
      SCOPED_TRACE(str(scenario.name, ", ", ranks, " ranks"));
      MemoryStorage memory(scenario.exchange);
      scenario.prepare(memory, "runs/out");
      Watch storage(memory, "runs/out");
      ASSERT_TRUE(scenario.save_on(storage, "runs/out").succeeded());
      EXPECT_EQ(storage.pointers, 1);
      pointers += storage.pointers;
      removals += storage.removals;
    }
  }
}

TEST(Kill, NothingIsPointedAtOrRemovedBeforeItsSuccessorIsDurable) {
  int pointers = 0, removals = 0;
  watch<PartialScenario>(pointers, removals);
  watch<FullScenario>(pointers, removals);
  EXPECT_EQ(pointers, 24);
  EXPECT_GT(removals, 40);
}

}  // namespace
}  // namespace shardsmith
