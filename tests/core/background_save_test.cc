#include "checkpoint/background_save.h"

#include <gmock/gmock.h>

#include <atomic>
#include <random>

#include "full_fixture.h"
#include "memory_storage.h"
#include "storage/faulty_storage.h"
#include "unsynced_storage.h"

namespace shardsmith {
namespace {

using testing::HasSubstr;

// Passes on, but a file's first write waits until it is let go.
class GatedStorage final : public ForwardingStorage {
 public:
  using ForwardingStorage::ForwardingStorage;
  void open_gate() { open_ = true; }
  std::unique_ptr<WriteFile> create(const std::string& path, Access access, uint64_t size) override {
    while (!open_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return base.create(path, access, size);
  }

 private:
  std::atomic<bool> open_{false};
};

// What each of several ranks has: a foreground, and a save in the background over channels of its own.
struct World {
  explicit World(int ranks, Storage& storage) : foreground(make_thread_peers(ranks)) {
    auto peers = make_thread_peers(ranks);
    auto transports = make_thread_transports(ranks);
    for (int r = 0; r < ranks; ++r) {
      const size_t i = static_cast<size_t>(r);
      saves.push_back(std::make_unique<BackgroundSave>(storage, std::move(peers[i]), std::move(transports[i])));
    }
  }
  // One thread a rank.
  void each(const std::function<void(int rank, Peers&, BackgroundSave&)>& work) {
    std::vector<std::thread> threads;
    for (size_t r = 0; r < saves.size(); ++r)
      threads.emplace_back([&, r] { work(static_cast<int>(r), *foreground[r], *saves[r]); });
    for (std::thread& thread : threads) thread.join();
  }
  std::vector<std::unique_ptr<Peers>> foreground;
  std::vector<std::unique_ptr<BackgroundSave>> saves;
};

// What a caller does right after begin(): it trains on.
void overwrite(const std::vector<SaveFile>& files) {
  for (const SaveFile& file : files)
    for (const ByteSource& source : file.content.storages)
      std::memset(const_cast<std::byte*>(source.data), 0xee, source.size);
}

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(BackgroundSave, SavesWhatWasThereAtTheCall) {
  for (const int ranks : {1, 2}) {
    MemoryStorage memory;
    GatedStorage storage(memory);
    World world(ranks, storage);
    const TestState state{"t", 3, ranks};
    world.each([&](int rank, Peers& foreground, BackgroundSave& save) {
      RankFiles files(state, rank, "out");
      EXPECT_TRUE(save.begin(foreground, files.request, IfBusy::kWait));
      overwrite(files.request.files);
    });
    EXPECT_FALSE(memory.stat("out/newest").exists);  // begin() has not waited for the writing
    storage.open_gate();
    world.each([&](int, Peers&, BackgroundSave& save) {
      const std::optional<SaveResult> result = save.wait();
      ASSERT_TRUE(result);
      EXPECT_EQ(result->folder, "out/t_partial");
      EXPECT_FALSE(save.wait());
    });
    expect_whole(memory, *find_checkpoint(memory, "out", "", nullptr), state);
  }
}

TEST(BackgroundSave, FullCheckpointsToo) {
  MemoryStorage storage;
  World world(3, storage);
  const FullState state{"model.pt", 3, 3, true};
  world.each([&](int rank, Peers& foreground, BackgroundSave& save) {
    RankFull full(state, rank, "out");
    EXPECT_TRUE(save.begin(foreground, full.request, IfBusy::kWait));
    for (const PtContent* content : {&*full.request.weights, &*full.request.optimizer})
      for (const ByteSource& source : content->storages)
        std::memset(const_cast<std::byte*>(source.data), 0xee, source.size);
    EXPECT_EQ(error_of([&] { EXPECT_TRUE(save.close()); }), "");
    EXPECT_THAT(error_of([&] { save.begin(foreground, full.request, IfBusy::kWait); }), HasSubstr("was closed"));
  });
  expect_whole(storage, *find_checkpoint(storage, "out", "", nullptr, CheckpointKind::kFull), state);
}

TEST(BackgroundSave, ABeginWhileOneRunsIsSkippedByAllOrWaits) {
  MemoryStorage memory;
  GatedStorage storage(memory);
  World world(2, storage);
  const TestState first{"a", 1, 2}, second{"b", 2, 2};
  world.each([&](int rank, Peers& foreground, BackgroundSave& save) {
    RankFiles files(first, rank, "out");
    ASSERT_TRUE(save.begin(foreground, files.request, IfBusy::kSkip));
    RankFiles other(second, rank, "out");
    EXPECT_FALSE(save.begin(foreground, other.request, IfBusy::kSkip));
    EXPECT_FALSE(save.is_idle_within(std::chrono::milliseconds(1)));
  });
  EXPECT_THAT(error_of([&] { storage.open_gate(); }), "");
  world.each([&](int rank, Peers& foreground, BackgroundSave& save) {
    RankFiles files(second, rank, "out");
    ASSERT_TRUE(save.begin(foreground, files.request, IfBusy::kWait));
    ASSERT_TRUE(save.wait());
  });
  expect_whole(memory, *find_checkpoint(memory, "out", "a", nullptr), first);
  expect_whole(memory, *find_checkpoint(memory, "out", "", nullptr), second);
}

TEST(BackgroundSave, TheBufferIsAllocatedOnceAndItsSizeIsSaidBeforehand) {
  MemoryStorage storage;
  World world(1, storage);
  BackgroundSave& save = *world.saves[0];
  RankFiles files({"t", 1, 1, {300, 4000}}, 0, "out");
  const uint64_t stated = BackgroundSave::memory_for(files.request);
  EXPECT_GE(stated, 2u * 300 * 4000 * 4);
  EXPECT_EQ(save.memory(), 0u);
  for (int round = 0; round < 3; ++round) {
    save.begin(*world.foreground[0], files.request, IfBusy::kWait);
    EXPECT_GE(save.memory(), stated);
    EXPECT_LT(save.memory(), stated + (2 << 20));
  }
  save.wait();
  // A storage that several files have is held once.
  SaveRequest twice = files.request;
  twice.files.push_back(twice.files[0]);
  EXPECT_EQ(BackgroundSave::memory_for(twice), stated);
}

TEST(BackgroundSave, AFailureIsKeptForTheNextCallAndIsTheSameEverywhere) {
  for (const std::string where : {"begin", "wait", "close"}) {
    MemoryStorage memory;
    FaultyStorage storage(memory, {Fault::Kind::kIoError, 6});
    World world(2, storage);
    std::vector<std::string> texts(2);
    world.each([&](int rank, Peers& foreground, BackgroundSave& save) {
      RankFiles files({"t", 1, 2}, rank, "out");
      ASSERT_TRUE(save.begin(foreground, files.request, IfBusy::kWait));
      while (!save.is_idle_within(std::chrono::seconds(1))) continue;
      texts[static_cast<size_t>(rank)] = error_of([&] {
        if (where == "begin") save.begin(foreground, files.request, IfBusy::kWait);
        if (where == "wait") save.wait();
        if (where == "close") save.close();
      });
      // Told once; the next one goes through.
      if (where == "close") return;
      EXPECT_TRUE(save.begin(foreground, files.request, IfBusy::kWait));
      EXPECT_EQ(error_of([&] { EXPECT_TRUE(save.wait()); }), "");
    });
    EXPECT_THAT(texts[0], HasSubstr("EIO"));
    EXPECT_EQ(texts[0], texts[1]);
    EXPECT_THAT(texts[0], testing::Not(HasSubstr("rank 0: rank")));
  }
}

TEST(BackgroundSave, ACopyThatFailsOnOneRankIsEverybodysErrorAndNothingIsWritten) {
  MemoryStorage storage;
  World world(2, storage);
  world.each([&](int rank, Peers& foreground, BackgroundSave& save) {
    RankFiles files({"t", 1, 2}, rank, "out");
    const std::string text = error_of([&] {
      save.begin(foreground, files.request, IfBusy::kWait, [&] {
        if (rank == 1) fail(ErrorKind::kInvalidArgument, "a tensor has changed while it was copied");
      });
    });
    EXPECT_EQ(text, "rank 1: a tensor has changed while it was copied");
    EXPECT_FALSE(save.wait());
  });
  EXPECT_EQ(storage.calls(), 0);
}

TEST(BackgroundSave, RanksThatDisagreeAreNamed) {
  MemoryStorage storage;
  World world(2, storage);
  world.each([&](int rank, Peers& foreground, BackgroundSave& save) {
    RankFiles files({rank == 0 ? "t" : "u", 1, 2}, rank, "out");
    EXPECT_THAT(error_of([&] { save.begin(foreground, files.request, rank == 0 ? IfBusy::kWait : IfBusy::kSkip); }),
                HasSubstr("rank 1 saves with if_busy \"skip\" but rank 0 with \"wait\""));
    ASSERT_TRUE(save.begin(foreground, files.request, IfBusy::kWait));
    EXPECT_THAT(error_of([&] { save.wait(); }), HasSubstr("rank 1 saves tag \"u\""));
  });
  EXPECT_EQ(storage.calls(), 0);
}

TEST(BackgroundSave, ARankThatIsGoneIsNamedInTime) {
  MemoryStorage storage;
  World world(2, storage);
  std::thread leaves([&] {
    RankFiles files({"t", 1, 2}, 1, "out");
    world.foreground[1].reset();
  });
  RankFiles files({"t", 1, 2}, 0, "out");
  EXPECT_THAT(error_of([&] { world.saves[0]->begin(*world.foreground[0], files.request, IfBusy::kWait); }),
              HasSubstr("rank 1"));
  leaves.join();
}

// Killed in the background while the foreground has gone on: old or new, whole, with the values at the call.
TEST(BackgroundSave, DiesAtEveryCallThatChangesSomething) {
  int points = 0;
  for (const int ranks : {1, 2}) {
    const TestState before{"a", 1, ranks}, saved{"a", 2, ranks};
    for (int64_t at = 0;; ++at) {
      SCOPED_TRACE(str(ranks, " ranks, killed at ", at));
      QuickFolder folder;
      const std::string path = join(folder.path(), "out");
      ASSERT_TRUE(save(unsynced_files(), before, path).succeeded());
      const int code = in_child([&] {
        FaultyStorage faulty(unsynced_files(), {Fault::Kind::kKill, at});
        World world(ranks, faulty);
        world.each([&](int rank, Peers& foreground, BackgroundSave& save) {
          RankFiles files(saved, rank, path);
          save.begin(foreground, files.request, IfBusy::kWait);
          overwrite(files.request.files);
          save.wait();
        });
      });
      const auto found = find_checkpoint(unsynced_files(), path, "", nullptr);
      ASSERT_TRUE(found);
      if (code == 0) {
        expect_whole(unsynced_files(), *found, saved);
        break;
      }
      ASSERT_EQ(code, 137);
      ++points;
      expect_whole(unsynced_files(), *found, found->manifest->step == 2 ? saved : before);
      ASSERT_TRUE(save(unsynced_files(), {"b", 3, ranks}, path).succeeded());
      EXPECT_TRUE(leftovers(unsynced_files(), path).empty());
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GT(points, 50);
}

}  // namespace
}  // namespace shardsmith
