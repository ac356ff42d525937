// Files that replicas hold alike, written by all of them.
#include "checkpoint/shared_files.h"

#include <gmock/gmock.h>

#include <iostream>

#include "memory_storage.h"
#include "scenarios.h"

namespace shardsmith {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string bytes_of(Storage& storage, const std::string& path) {
  const auto file = storage.open_read(path);
  std::string bytes(file->size(), '\0');
  file->read(0, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

// Counts the bytes that are written into each file, by whoever opens it.
class Counting final : public ForwardingStorage {
 public:
  using ForwardingStorage::ForwardingStorage;
  std::mutex mutex;
  std::map<std::string, std::map<std::thread::id, uint64_t>> written;
  std::unique_ptr<WriteFile> create(const std::string& path, Access access, uint64_t size) override {
    return std::make_unique<File>(base.create(path, access, size), *this);
  }
  std::unique_ptr<WriteFile> open_write(const std::string& path, Access access) override {
    return std::make_unique<File>(base.open_write(path, access), *this);
  }

 private:
  class File final : public WriteFile {
   public:
    File(std::unique_ptr<WriteFile> base, Counting& owner)
        : base_(std::move(base)), owner_(owner), opener_(std::this_thread::get_id()) {}
    void write(uint64_t offset, std::span<const std::byte> bytes) override {
      {
        std::lock_guard lock(owner_.mutex);
        owner_.written[base_name(base_->path())][opener_] += bytes.size();
      }
      base_->write(offset, bytes);
    }
    void truncate(uint64_t size) override { base_->truncate(size); }
    void sync() override { base_->sync(); }
    void close() override { base_->close(); }
    const std::string& path() const override { return base_->path(); }

   private:
    std::unique_ptr<WriteFile> base_;
    Counting& owner_;
    std::thread::id opener_;
  };
};

TEST(SharedFiles, HaveTheBytesThatOneRankWrites) {
  for (const int ranks : {1, 2, 3, 4}) {
    MemoryStorage storage;
    const Replicas state{"t", 3, ranks};
    const SaveOutcome outcome = save_together(storage, state, "out");
    for (const auto& error : outcome.errors) ASSERT_FALSE(error) << error->what();
    EXPECT_TRUE(outcome.results[0]->warnings.empty());
    ASSERT_TRUE(save(storage, state.alike(), "one").succeeded());
    const auto found = find_checkpoint(storage, "out", "", nullptr);
    ASSERT_TRUE(found) << scan(storage, "out")[0].why_not;
    EXPECT_EQ(verify_partial(storage, found->folder, *found->manifest), std::vector<std::string>{});
    for (const char* name : {"model_0_0.pt", "optimizer_0_0.pt"}) {
      const std::string ours = bytes_of(storage, join("out/t_partial", name));
      std::string theirs = bytes_of(storage, join("one/t_partial", name));
      EXPECT_EQ(ours.size(), theirs.size());
      const uint64_t covered = read_pt_record(storage, join("out/t_partial", name)).checksums->covered;
      EXPECT_TRUE(ours.substr(0, covered) == theirs.substr(0, covered));
      EXPECT_EQ(read_pt_record(storage, join("out/t_partial", name)).checksums->crc,
                read_pt_record(storage, join("one/t_partial", name)).checksums->crc);
    }
    // In the order of the announcements, as readers of several stages count on it.
    std::vector<std::string> names;
    for (const ManifestFile& file : found->manifest->files) names.push_back(file.name);
    EXPECT_EQ(names[0], "model_0_0.pt");
    EXPECT_EQ(names[1], "optimizer_0_0.pt");
    EXPECT_EQ(names.size(), 3u + static_cast<size_t>(ranks));
    expect_whole(storage, *found, state.alike());
  }
}

TEST(SharedFiles, ReplicasWriteAboutAsMuchAndNothingTwice) {
  MemoryStorage memory;
  Counting storage(memory);
  const Replicas state{"t", 3, 2, {1000, 1000}};
  const SaveOutcome outcome = save_together(storage, state, "out");
  ASSERT_TRUE(outcome.succeeded());
  uint64_t sum = 0;
  std::map<std::thread::id, uint64_t> by_rank;
  for (const char* name : {"model_0_0.pt", "optimizer_0_0.pt"}) {
    EXPECT_EQ(storage.written[name].size(), 2u);
    for (const auto& [thread, bytes] : storage.written[name]) by_rank[thread] += bytes, sum += bytes;
  }
  const uint64_t sizes =
      memory.stat("out/t_partial/model_0_0.pt").size + memory.stat("out/t_partial/optimizer_0_0.pt").size;
  EXPECT_GE(sum, sizes);
  EXPECT_LE(sum, sizes + 100);  // descriptors that had to wait for the other's checksums
  for (const auto& [thread, bytes] : by_rank) EXPECT_NEAR(static_cast<double>(bytes), sizes / 2.0, 2.5 * (1 << 20));
}

TEST(SharedFiles, OnSeveralMachinesWholeFilesAreDealtOut) {
  MemoryStorage memory;
  Counting storage(memory);
  const Replicas state{"t", 3, 2, {1000, 1000}};
  const SaveOutcome outcome = save_together(
      storage, state, "out", [](int rank, SaveRequest& request) { request.host = "machine " + std::to_string(rank); });
  ASSERT_TRUE(outcome.succeeded());
  std::map<std::thread::id, int> files_of;
  for (const char* name : {"model_0_0.pt", "optimizer_0_0.pt"}) {
    ASSERT_EQ(storage.written[name].size(), 1u);
    ++files_of[storage.written[name].begin()->first];
  }
  EXPECT_EQ(files_of.size(), 2u) << "one rank has written both";
  expect_whole(memory, *find_checkpoint(memory, "out", "", nullptr), state.alike());
}

TEST(SharedFiles, ReplicasThatDifferAreToldAndTheFirstOnesFileCounts) {
  MemoryStorage storage;
  const Replicas state{"t", 3, 3};
  const SaveOutcome outcome = save_together(storage, state, "out", [](int rank, SaveRequest& request) {
    if (rank == 2) request.files[1].content.value.set("param_groups", List{"another one"});
  });
  ASSERT_TRUE(outcome.succeeded());
  EXPECT_THAT(outcome.results[1]->warnings,
              ElementsAre(HasSubstr("optimizer_0_0.pt is not the same on ranks 0 and 2")));
  expect_whole(storage, *find_checkpoint(storage, "out", "", nullptr), state.alike());
}

TEST(SharedFiles, AFileThatOnlyOneCallsSharedIsTwiceThere) {
  MemoryStorage storage;
  const SaveOutcome outcome = save_together(storage, {"t", 3, 2}, "out", [](int rank, SaveRequest& request) {
    if (rank == 1) request.files[0].shared = false;
  });
  ASSERT_TRUE(outcome.errors[0]);
  EXPECT_THAT(outcome.errors[0]->what(), HasSubstr("rank 1 saves model_0_0.pt, which another file is called too"));
  EXPECT_EQ(storage.calls(), 0);
}

TEST(SharedFiles, KilledAtEveryCallWithTwoAndThreeWritersOfOneFile) {
  int points = 0;
  for (const int ranks : {2, 3}) {
    for (const ReplicaScenario& scenario : ReplicaScenario::all(ranks)) {
      for (int64_t at = 0;; ++at) {
        SCOPED_TRACE(str(scenario.name, ", ", ranks, " writers, killed at ", at));
        QuickFolder folder;
        const std::string path = join(folder.path(), "out");
        for (const Replicas& state : scenario.before)
          ASSERT_TRUE(save_together(unsynced_files(), state, path).succeeded());
        const Fault::Kind kind = at % 2 ? Fault::Kind::kKill : Fault::Kind::kKillHalf;
        const int code = in_child([&] {
          FaultyStorage faulty(unsynced_files(), {kind, at});
          scenario.save_on(faulty, path);
        });
        if (code == 0) break;
        ASSERT_EQ(code, 137);
        ++points;
        scenario.expect_recovers(unsynced_files(), path);
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_GT(points, 100);
  std::cout << "kill points of shared files: " << points << "\n";
}

TEST(SharedFiles, PowerIsCutAtEveryCall) {
  int points = 0;
  for (const ReplicaScenario& scenario : ReplicaScenario::all(2)) {
    for (int trial = 0; trial < 2; ++trial) {
      for (int64_t at = 0;; ++at) {
        SCOPED_TRACE(str(scenario.name, ", power cut at ", at, ", trial ", trial));
        std::mt19937 random(static_cast<unsigned>(at * 10 + trial));
        MemoryStorage storage;
        for (const Replicas& state : scenario.before)
          ASSERT_TRUE(save_together(storage, state, "runs/out").succeeded());
        storage.cut_power_at(at);
        const SaveOutcome outcome = save_together(storage, scenario.saved, "runs/out");
        storage.reboot(trial == 0 ? nullptr : &random);
        scenario.expect_recovers(storage, "runs/out", outcome.power_cut ? 0 : 2);
        if (HasFatalFailure()) return;
        if (!outcome.power_cut) break;
        ++points;
      }
    }
  }
  EXPECT_GT(points, 50);
}

TEST(SharedFiles, EveryCallMayFail) {
  int failed = 0;
  for (const ReplicaScenario& scenario : ReplicaScenario::all(2)) {
    for (const Fault::Kind kind : {Fault::Kind::kIoError, Fault::Kind::kSyncFails}) {
      for (int64_t at = 0;; ++at) {
        SCOPED_TRACE(str(scenario.name, ", fault ", static_cast<int>(kind), " at ", at));
        MemoryStorage storage;
        for (const Replicas& state : scenario.before) ASSERT_TRUE(save_together(storage, state, "out").succeeded());
        FaultyStorage faulty(storage, {kind, at});
        const SaveOutcome outcome = scenario.save_on(faulty, "out");
        if (!outcome.succeeded()) {
          ++failed;
          for (const auto& error : outcome.errors) {
            ASSERT_TRUE(error);
            EXPECT_STREQ(error->what(), outcome.errors[0]->what());
            EXPECT_THAT(error->what(), HasSubstr("EIO"));
          }
        }
        scenario.expect_recovers(storage, "out", outcome.succeeded() ? 2 : 1);
        if (HasFatalFailure()) return;
        if (at >= faulty.calls()) break;
      }
    }
  }
  EXPECT_GT(failed, 40);
}

}  // namespace
}  // namespace shardsmith
