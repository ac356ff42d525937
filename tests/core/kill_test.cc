// The machine dies at every call that changes something; afterwards the folder holds the old or the new state, whole,
// and the next save goes through and leaves nothing of the dead one.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>

#include "checkpoint_fixture.h"
#include "memory_storage.h"
#include "storage/faulty_storage.h"
#include "unsynced_storage.h"

namespace shardsmith {
namespace {

// Two processes over a socket pair.
class SocketPeers final : public Peers {
 public:
  SocketPeers(int rank, int socket) : rank_(rank), socket_(socket) {}
  ~SocketPeers() override { ::close(socket_); }
  int rank() const override { return rank_; }
  int size() const override { return 2; }
  std::vector<std::string> exchange(const std::string& message, std::chrono::milliseconds deadline) override {
    const uint64_t length = message.size();
    send_all(&length, sizeof(length));
    send_all(message.data(), message.size());
    uint64_t theirs = 0;
    receive_all(&theirs, sizeof(theirs), deadline);
    std::string answer(theirs, '\0');
    receive_all(answer.data(), answer.size(), deadline);
    return rank_ == 0 ? std::vector{message, answer} : std::vector{answer, message};
  }

 private:
  void send_all(const void* data, size_t size) {
    if (::send(socket_, data, size, MSG_NOSIGNAL) != static_cast<ssize_t>(size))
      fail(ErrorKind::kPeer, "rank ", 1 - rank_, " is dead");
  }
  void receive_all(void* data, size_t size, std::chrono::milliseconds deadline) {
    for (size_t done = 0; done < size;) {
      pollfd poll{socket_, POLLIN, 0};
      if (::poll(&poll, 1, static_cast<int>(deadline.count())) <= 0)
        fail(ErrorKind::kTimeout, "no answer from rank ", 1 - rank_);
      const ssize_t n = ::recv(socket_, static_cast<char*>(data) + done, size - done, 0);
      if (n <= 0) fail(ErrorKind::kPeer, "rank ", 1 - rank_, " is dead");
      done += static_cast<size_t>(n);
    }
  }
  int rank_, socket_;
};

struct Scenario {
  std::string name;
  int ranks = 1;
  std::vector<TestState> before;  // saved already, oldest first
  TestState saved;                // the save that dies
  int keep = -1;
  bool exchange = true;
};

std::vector<Scenario> scenarios(int ranks) {
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

std::string folder_of(const QuickFolder& folder) { return join(folder.path(), "out"); }

void prepare(Storage& storage, const Scenario& scenario, const std::string& path) {
  for (const TestState& state : scenario.before) ASSERT_TRUE(save(storage, state, path).succeeded());
}

// Saves as `scenario` says over a storage that fails.
SaveOutcome save_on(Storage& faulty, const Scenario& scenario, const std::string& path) {
  const auto with_keep = [&](int, SaveRequest& request) { request.num_kept_partial_checkpoints = scenario.keep; };
  if (scenario.exchange) return save(faulty, scenario.saved, path, with_keep);
  FaultyStorage without(faulty, {Fault::Kind::kNoExchange});
  return save(without, scenario.saved, path, with_keep);
}

// Old or new, whole; then a next save, after which nothing is left of the dead one. `must`: 0 either, 1 old, 2 new.
void expect_recovers(Storage& storage, const Scenario& scenario, const std::string& path, int must = 0) {
  std::optional<Found> found;
  if (storage.stat(path).exists) found = find_checkpoint(storage, path, "", nullptr);
  const bool is_new = found && found->manifest->step == scenario.saved.step;
  if (must == 2) {
    ASSERT_TRUE(is_new);
  }
  if (must == 1) {
    ASSERT_FALSE(is_new);
  }
  if (is_new) {
    expect_whole(storage, *found, scenario.saved);
  } else if (scenario.before.empty()) {
    ASSERT_FALSE(found);
  } else {
    ASSERT_TRUE(found);
    expect_whole(storage, *found, scenario.before.back());
  }
  // Whatever counts as complete is whole.
  if (storage.stat(path).exists) {
    for (const Found& any : scan(storage, path)) {
      if (!any.complete) continue;
      EXPECT_EQ(verify_partial(storage, any.folder, *any.manifest), std::vector<std::string>{});
    }
  }
  const std::string kept = found ? found->name : "";
  TestState next{"next", 9, scenario.ranks};
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
    expect_whole(storage, *still, is_new ? scenario.saved : scenario.before.back());
  }
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

TEST(Kill, AtEveryCallOfASaveWithRanksAsThreads) {
  int points = 0;
  for (int ranks : {1, 2}) {
    for (const Scenario& scenario : scenarios(ranks)) {
      const Prepared prepared(scenario);
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
  std::cout << "kill points: " << points << " (threads)\n";
  RecordProperty("kill_points", points);
}

// One of two processes dies; the other says so and ends.
TEST(Kill, AtEveryCallOfEitherOfTwoProcesses) {
  int points = 0;
  for (const Scenario& scenario : scenarios(2)) {
    const Prepared prepared(scenario);
    for (int victim : {0, 1}) {
      for (int64_t at = 0;; ++at) {
        SCOPED_TRACE(str(scenario.name, ", rank ", victim, " killed at ", at));
        QuickFolder folder;
        const std::string path = folder_of(folder);
        prepared.copy_to(path);
        int sockets[2];
        ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
        pid_t children[2];
        for (int rank : {0, 1}) {
          children[rank] = ::fork();
          if (children[rank] != 0) continue;
          ::close(sockets[1 - rank]);
          SocketPeers peers(rank, sockets[rank]);
          FaultyStorage faulty(unsynced_files(), rank == victim ? Fault{Fault::Kind::kKill, at} : Fault{});
          FaultyStorage without(faulty, {Fault::Kind::kNoExchange});
          RankFiles files(scenario.saved, rank, path);
          files.request.num_kept_partial_checkpoints = scenario.keep;
          try {
            save_partial(scenario.exchange ? static_cast<Storage&>(faulty) : without, peers, files.request);
            ::_exit(0);
          } catch (const Error& e) {
            ::_exit(e.kind() == ErrorKind::kPeer ? 3 : 4);
          }
        }
        ::close(sockets[0]);
        ::close(sockets[1]);
        int codes[2];
        for (int rank : {0, 1}) {
          int status = 0;
          ::waitpid(children[rank], &status, 0);
          codes[rank] = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        }
        if (codes[victim] == 0) {
          EXPECT_EQ(codes[1 - victim], 0);
          break;  // no more calls
        }
        ASSERT_EQ(codes[victim], 137);
        ASSERT_EQ(codes[1 - victim], 3);
        ++points;
        expect_recovers(unsynced_files(), scenario, path);
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_GT(points, 100);
  std::cout << "kill points: " << points << " (processes)\n";
}

// What a kill leaves alone and a power cut does not: bytes and names that were never synced.
TEST(Kill, PowerIsCutAtEveryCall) {
  int points = 0;
  for (int ranks : {1, 2}) {
    for (const Scenario& scenario : scenarios(ranks)) {
      const std::string path = "runs/out";
      for (int trial = 0; trial < 4; ++trial) {
        for (int64_t at = 0;; ++at) {
          SCOPED_TRACE(str(scenario.name, ", ", ranks, " ranks, power cut at ", at, ", trial ", trial));
          std::mt19937 random(static_cast<unsigned>(at * 10 + trial));
          MemoryStorage storage(scenario.exchange);
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
  std::cout << "power cut points: " << points << "\n";
}

// An error of the storage, at every call: all ranks say the same, the old state stays, and nothing is left after the
// next save. Errors of tidying up come after the commit and are warnings.
TEST(Kill, EveryCallMayFail) {
  int points = 0, failed = 0, warned = 0;
  for (int ranks : {1, 2}) {
    for (const Scenario& scenario : scenarios(ranks)) {
      const Prepared prepared(scenario);
      const std::vector<std::string> log = calls_of(scenario);
      for (const Fault::Kind kind : {Fault::Kind::kIoError, Fault::Kind::kNoSpace, Fault::Kind::kSyncFails}) {
        for (int64_t at = 0; at < static_cast<int64_t>(log.size()); ++at) {
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
              if (ranks > 1) {
                EXPECT_EQ(text.rfind(str("rank ", error->rank(), ": "), 0), 0u) << text;
              }
            }
            expect_recovers(unsynced_files(), scenario, path, 1);
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

}  // namespace
}  // namespace shardsmith
