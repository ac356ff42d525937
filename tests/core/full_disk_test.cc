// A disk that is really full: a small ext4 image, and a small tmpfs, with room left for the first so many bytes of a
// save. All ranks get the error, what was there before is there, whole, and with some room the next save goes through.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/statvfs.h>

#include <iostream>

#include "scenarios.h"

namespace shardsmith {
namespace {

// Says that there is room, as where another program fills the disk in the meantime.
class Hopeful final : public ForwardingStorage {
 public:
  using ForwardingStorage::ForwardingStorage;
  uint64_t free_bytes(const std::string&) override { return uint64_t{1} << 40; }
};

bool works(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

// Only this process sees what it mounts, and it is gone when the process ends.
bool may_mount() {
  const int flags = ::geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWNS | CLONE_NEWUSER;
  return ::unshare(flags) == 0 && ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

bool mount_ext4(const QuickFolder& folder, const std::string& at) {
  const std::string image = join(folder.path(), "image");
  if (!works("truncate -s 32M " + image + " && mkfs.ext4 -q -F -m 0 " + image)) return false;
  return works("mount -o loop " + image + " " + at) || works("fuse2fs " + image + " " + at);
}

bool mount_tmpfs(const QuickFolder&, const std::string& at) {
  return ::mount("none", at.c_str(), "tmpfs", 0, "size=24m") == 0;
}

uint64_t free_at(const std::string& path) {
  struct statvfs info;
  return ::statvfs(path.c_str(), &info) == 0 ? static_cast<uint64_t>(info.f_bavail) * info.f_frsize : 0;
}

// Takes all room but `left` bytes, until it is destroyed.
class Filler {
 public:
  Filler(const std::string& path, uint64_t left) : path_(join(path, "filler")) {
    const int file = ::open(path_.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    const uint64_t free = free_at(path);
    // Extents take room, too.
    for (uint64_t size = free > left ? free - left : 0; size > 0; size -= std::min<uint64_t>(size, 4096))
      if (::fallocate(file, 0, 0, static_cast<off_t>(size)) == 0) break;
    ::fsync(file);
    ::close(file);
  }
  ~Filler() { ::unlink(path_.c_str()); }
  Filler(const Filler&) = delete;

 private:
  std::string path_;
};

struct Count {
  int points = 0, failed = 0;
};

template <typename Scenario>
void fill(const Scenario& scenario, const std::string& disk, Count& count) {
  const std::string path = join(disk, "out");
  const Prepared<Scenario> prepared(scenario);
  // How much the save takes at most.
  uint64_t needs = 256 << 10;
  {
    const QuickFolder folder;
    scenario.prepare(unsynced_files(), folder_of(folder));
    ASSERT_TRUE(scenario.save_on(unsynced_files(), folder_of(folder)).succeeded());
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_of(folder)))
      if (entry.is_regular_file()) needs += entry.file_size() + 8192;
  }
  const uint64_t parts = std::getenv("SHARDSMITH_LONG") ? 48 : 3;
  for (uint64_t part = 0; part <= parts; ++part) {
    SCOPED_TRACE(str(scenario.name, ", ", scenario.ranks, " ranks, room for ", needs * part / parts, " bytes"));
    remove_tree(local_storage(), path);
    prepared.copy_to(path);
    ::sync();
    Hopeful hopeful(local_storage());
    SaveOutcome outcome;
    {
      const Filler filler(disk, needs * part / parts);
      outcome = scenario.save_on(hopeful, path);
    }
    ++count.points;
    if (!outcome.succeeded()) {
      ++count.failed;
      for (const auto& error : outcome.errors) {
        ASSERT_TRUE(error);
        EXPECT_STREQ(error->what(), outcome.errors[0]->what());
        EXPECT_THAT(error->what(), testing::HasSubstr("ENOSPC"));
      }
    }
    scenario.expect_recovers(local_storage(), path, outcome.succeeded() ? 2 : 1);
    if (testing::Test::HasFailure()) return;
  }
}

// Where nobody lies about the room, the save is refused before anything is written.
void refuse(const std::string& disk) {
  const std::string path = join(disk, "out");
  remove_tree(local_storage(), path);
  const TestState before{"a", 1, 2, {64, 1024}}, after{"b", 2, 2, {64, 1024}};
  ASSERT_TRUE(save(local_storage(), before, path).succeeded());
  const std::vector<std::string> names = local_storage().list(path);
  const Filler filler(disk, 300 << 10);
  const SaveOutcome outcome = save(local_storage(), after, path);
  for (const auto& error : outcome.errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), ErrorKind::kNoSpace);
    EXPECT_THAT(error->what(), testing::HasSubstr("nothing was written"));
  }
  EXPECT_EQ(local_storage().list(path), names);
}

enum { kFine = 0, kBroken = 1, kCantMount = 77 };

int campaign(bool (*mount)(const QuickFolder&, const std::string&), const char* what) {
  return in_child_with_code([&]() -> int {
    const QuickFolder folder;
    const std::string disk = join(folder.path(), "disk");
    local_storage().make_directory(disk);
    if (!may_mount() || !mount(folder, disk)) return kCantMount;
    Count count;
    for (PartialScenario& scenario : PartialScenario::all(2)) {
      for (TestState& state : scenario.before) state.shape = {64, 1024};
      scenario.saved.shape = {64, 1024};
      fill(scenario, disk, count);
    }
    for (const FullScenario& scenario : FullScenario::all(2)) fill(scenario, disk, count);
    refuse(disk);
    EXPECT_GT(count.failed, count.points / 3);
    EXPECT_LT(count.failed, count.points);
    std::cout << "full disk (" << what << "): " << count.points << " points, of them " << count.failed
              << " failed the save" << std::endl;
    return testing::Test::HasFailure() ? kBroken : kFine;
  });
}

TEST(FullDisk, Ext4Image) {
  const int code = campaign(mount_ext4, "ext4");
  if (code == kCantMount)
    GTEST_SKIP() << "an ext4 image can be neither mounted by mkfs.ext4 and mount -o loop nor by fuse2fs";
  EXPECT_EQ(code, kFine) << "see above";
}

TEST(FullDisk, Tmpfs) {
  const int code = campaign(mount_tmpfs, "tmpfs");
  if (code == kCantMount) GTEST_SKIP() << "no tmpfs can be mounted, not in a user namespace either";
  EXPECT_EQ(code, kFine) << "see above";
}

}  // namespace
}  // namespace shardsmith
