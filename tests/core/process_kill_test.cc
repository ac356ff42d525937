// Ranks that are processes die one by one or all together, at every call of a save that changes something: of partial
// and full saves, by one to three writers, waited for or in the background. The others say who is dead, and end; `ls`,
// `verify` and a reader find the old or the new state, whole; the next save leaves nothing of the dead one.
#include <gmock/gmock.h>

#include <iostream>

#include "base/value.h"
#include "checkpoint/background_save.h"
#include "cli/verbs.h"
#include "process_ranks.h"
#include "scenarios.h"

namespace shardsmith {
namespace {

using testing::HasSubstr;

// What a verb prints; its exit code must be 0.
std::string printed(int (*verb)(const std::vector<std::string>&), const std::vector<std::string>& arguments) {
  std::ostringstream out;
  std::streambuf* const before = std::cout.rdbuf(out.rdbuf());
  int code = -1;
  try {
    code = verb(arguments);
  } catch (const Error& e) {
    std::cout.rdbuf(before);
    ADD_FAILURE() << arguments[0] << ": " << e.what();
  }
  std::cout.rdbuf(before);
  EXPECT_EQ(code, 0) << arguments[0] << ": " << out.str();
  return out.str();
}

// What `ls` calls complete, `verify` finds sound. How many these are.
int sound_ones(const std::string& path) {
  if (!std::filesystem::exists(path)) return 0;
  const Value listed = parse_json(printed(cli::run_ls, {path, "--json"}), "ls");
  int sound = 0;
  for (const Value& entry : *listed.find("checkpoints")->get_if<List>()) {
    if (*entry.find("complete") != Value(true)) continue;
    const Value* place = entry.find("folder") ? entry.find("folder") : entry.find("file");
    const std::string verdict = printed(cli::run_verify, {*place->get_if<std::string>(), "--json", "-q"});
    EXPECT_THAT(verdict, HasSubstr("\"sound\": true"));
    ++sound;
  }
  return sound;
}

enum class Way { kWaiting, kBackground };

// What a rank does; throws what its save throws.
template <typename Scenario>
void save_in_process(Storage& storage, const Scenario& scenario, Way way, int rank, Channels channels,
                     const std::string& path) {
  const auto mine = scenario.of_rank(rank, path);
  FaultyStorage without(storage, {Fault::Kind::kNoExchange});
  Storage& place = scenario.exchange ? storage : without;
  if (way == Way::kWaiting) {
    scenario.save_as(place, *channels.peers, *channels.transport, mine->request);
    return;
  }
  BackgroundSave save(place, std::move(channels.peers), std::move(channels.transport));
  save.begin(*channels.foreground, mine->request, IfBusy::kWait);
  save.wait();
}

struct Count {
  int points = 0, together = 0, survivors = 0;
};

// `victim` is killed at its call `at`. False where its save has no such call.
template <typename Scenario>
bool kill_one(const Scenario& scenario, const Prepared<Scenario>& prepared, Way way, int victim, int64_t at,
              bool together, Count& count) {
  const QuickFolder folder;
  const std::string path = folder_of(folder);
  prepared.copy_to(path);
  const std::vector<RankEnd> ends = run_processes(scenario.ranks, together, [&](int rank, Channels channels) {
    FaultyStorage faulty(unsynced_files(), rank == victim ? Fault{Fault::Kind::kKill, at} : Fault{});
    save_in_process(faulty, scenario, way, rank, std::move(channels), path);
  });
  const RankEnd& dead = ends[static_cast<size_t>(victim)];
  EXPECT_NE(dead.how, RankEnd::kFailed) << dead.error;
  if (dead.how == RankEnd::kDone) {
    for (const RankEnd& end : ends) EXPECT_EQ(end.how, RankEnd::kDone) << end.error;
    scenario.expect_recovers(unsynced_files(), path, 2);
    return false;
  }
  ++count.points;
  count.together += together ? 1 : 0;
  for (int rank = 0; rank < scenario.ranks; ++rank) {
    const RankEnd& end = ends[static_cast<size_t>(rank)];
    if (rank == victim || (together && end.how == RankEnd::kKilled)) continue;
    EXPECT_EQ(end.how, RankEnd::kFailed) << "rank " << rank;
    EXPECT_THAT(end.error, HasSubstr(str("rank ", victim, " is dead")));
    ++count.survivors;
  }
  const bool had_any = !scenario.before.empty();
  EXPECT_GE(sound_ones(path), had_any ? 1 : 0);
  scenario.expect_recovers(unsynced_files(), path);
  return true;
}

template <typename Scenario>
void kill_everywhere(Way way, const std::vector<int>& sizes, int64_t usual_step, const char* what) {
  Points sample(usual_step);
  Count count;
  for (const int ranks : sizes) {
    for (const Scenario& scenario : Scenario::all(ranks)) {
      const Prepared<Scenario> prepared(scenario);
      for (int victim = 0; victim < ranks; ++victim) {
        for (const bool together : {false, true}) {
          if (together && ranks == 1) continue;
          for (int64_t at = sample.first();; at += sample.step) {
            SCOPED_TRACE(str(scenario.name, ", ", ranks, " ranks, rank ", victim, " killed at ", at,
                             together ? " and all others with it" : ""));
            if (!kill_one(scenario, prepared, way, victim, at, together, count)) break;
            if (testing::Test::HasFailure()) return;
          }
        }
      }
    }
  }
  EXPECT_GT(count.points, 6);
  EXPECT_GT(count.survivors, 2);
  EXPECT_GT(count.together, 2);
  std::cout << "kill points of " << what << ": " << count.points << " (processes), in " << count.together
            << " of them all ranks died; " << count.survivors << " survivors named the dead one\n";
  testing::Test::RecordProperty("kill_points", count.points);
}

TEST(ProcessKill, PartialSaves) { kill_everywhere<PartialScenario>(Way::kWaiting, {1, 2, 3}, 13, "partial saves"); }
TEST(ProcessKill, PartialSavesOfReplicas) {
  kill_everywhere<ReplicaScenario>(Way::kWaiting, {2, 3}, 17, "partial saves of replicas");
}
TEST(ProcessKill, FullSaves) { kill_everywhere<FullScenario>(Way::kWaiting, {1, 2, 3}, 53, "full saves"); }
TEST(ProcessKill, PartialSavesInTheBackground) {
  kill_everywhere<PartialScenario>(Way::kBackground, {1, 2}, 29, "partial saves in the background");
}
TEST(ProcessKill, FullSavesInTheBackground) {
  kill_everywhere<FullScenario>(Way::kBackground, {1, 2, 3}, 67, "full saves in the background");
}

}  // namespace
}  // namespace shardsmith
