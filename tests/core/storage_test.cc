// The machine's file system, and the one that fails on purpose.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>

#include "storage/faulty_storage.h"
#include "storage/storage.h"
#include "test_files.h"

namespace shardsmith {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = Fault::Kind;

class Local : public ::testing::TestWithParam<Access> {
 protected:
  TestFolder folder_;
  Storage& storage_ = local_storage();
};

TEST_P(Local, UnalignedWritesAndReadsMeetInTheMiddle) {
  std::mt19937 random(3);
  std::string model(3 << 20, '\0');
  const std::string path = folder_ / "f";
  AlignedBuffer buffer(1 << 20);
  {
    const auto file = storage_.create(path, GetParam(), model.size());
    for (int i = 0; i < 60; ++i) {
      const size_t offset = random() % (model.size() - 1), address = random() % 3 ? offset % 4096 : random() % 4096;
      const size_t length = std::min<size_t>({1 + random() % 200000, model.size() - offset, buffer.size() - 4096});
      for (size_t k = 0; k < length; ++k) buffer.data()[address + k] = static_cast<std::byte>(random());
      file->write(offset, {buffer.data() + address, length});
      std::memcpy(model.data() + offset, buffer.data() + address, length);
    }
    file->sync();
    file->close();
  }
  EXPECT_EQ(get_file(path), model);
  const auto file = storage_.open_read(path, GetParam());
  EXPECT_EQ(file->size(), model.size());
  for (int i = 0; i < 60; ++i) {
    const size_t offset = random() % model.size(), address = random() % 3 ? offset % 4096 : random() % 4096;
    const size_t length = std::min<size_t>({1 + random() % 200000, model.size() - offset, buffer.size() - 4096});
    file->read(offset, {buffer.data() + address, length});
    EXPECT_EQ(std::memcmp(buffer.data() + address, model.data() + offset, length), 0) << offset << " " << length;
  }
  const Error e = thrown([&] { file->read(model.size() - 10, {buffer.data(), 4096}); });
  EXPECT_EQ(e.kind(), ErrorKind::kCorrupt);
  EXPECT_THAT(e.what(), HasSubstr("truncated"));
}

INSTANTIATE_TEST_SUITE_P(Access, Local, ::testing::Values(Access::kBuffered, Access::kDirect));

TEST(LocalStorage, AMissingPathIsNotFoundAndNamed) {
  TestFolder folder;
  const Error e = thrown([&] { local_storage().open_read(folder / "no"); });
  EXPECT_EQ(e.kind(), ErrorKind::kNotFound);
  EXPECT_THAT(e.what(), HasSubstr(folder / "no"));
  EXPECT_FALSE(local_storage().stat(folder / "no").exists);
  EXPECT_FALSE(local_storage().stat(folder / "no/deeper").exists);
  EXPECT_NO_THROW(local_storage().remove_file(folder / "no"));
  EXPECT_NO_THROW(local_storage().remove_directory(folder / "no"));
}

TEST(LocalStorage, AFullDeviceIsToldByItsName) {
  if (::access("/dev/full", W_OK) != 0) GTEST_SKIP();
  const auto file = local_storage().create("/dev/full");
  const std::string bytes(10, 'x');
  const Error e = thrown([&] { file->write(0, std::as_bytes(std::span(bytes))); });
  EXPECT_EQ(e.kind(), ErrorKind::kIo);
  EXPECT_THAT(e.what(), HasSubstr("ENOSPC"));
}

TEST(LocalStorage, TooLargeAFileIsRefusedBeforeAnythingIsWritten) {
  TestFolder folder;
  const Error e = thrown([&] { local_storage().create(folder / "f", Access::kDirect, uint64_t{1} << 60); });
  EXPECT_EQ(e.kind(), ErrorKind::kNoSpace);
  EXPECT_FALSE(local_storage().stat(folder / "f").exists);
}

TEST(LocalStorage, FilesGetTheModeThatTheUmaskLeaves) {
  TestFolder folder;
  const mode_t before = ::umask(0027);
  write_text_atomic(local_storage(), folder / "f", "x");
  ::umask(before);
  struct stat info;
  ASSERT_EQ(::stat((folder / "f").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);
}

TEST(LocalStorage, DirectoriesParentsAndLinks) {
  TestFolder folder;
  Storage& s = local_storage();
  s.make_directory(folder / "a/b/c");
  s.make_directory(folder / "a/b/c");
  std::filesystem::create_symlink(folder / "a", folder / "link");
  EXPECT_TRUE(s.stat(folder / "link").is_link);
  s.make_directory(folder / "link");
  put_file(folder / "file", "x");
  EXPECT_EQ(thrown([&] { s.make_directory(folder / "file"); }).kind(), ErrorKind::kIo);
  EXPECT_THAT(s.list(folder.path()), ElementsAre("a", "file", "link"));
  remove_tree(s, folder / "link");
  EXPECT_TRUE(s.stat(folder / "a/b/c").is_directory);
  remove_tree(s, folder / "a");
  EXPECT_FALSE(s.stat(folder / "a").exists);
  EXPECT_GT(s.free_bytes(folder.path()), 0u);
  s.sync_directory(folder.path());
}

TEST(LocalStorage, ExchangeSwapsTwoFolders) {
  TestFolder folder;
  Storage& s = local_storage();
  s.make_directory(folder / "a");
  s.make_directory(folder / "b");
  put_file(folder / "a/1", "");
  put_file(folder / "b/2", "");
  if (!s.exchange(folder / "a", folder / "b")) GTEST_SKIP() << "this file system has no exchange";
  EXPECT_THAT(s.list(folder / "a"), ElementsAre("2"));
  EXPECT_THAT(s.list(folder / "b"), ElementsAre("1"));
  EXPECT_EQ(thrown([&] { s.exchange(folder / "a", folder / "none"); }).kind(), ErrorKind::kNotFound);
}

TEST(LocalStorage, AFifoIsNotWaitedFor) {
  TestFolder folder;
  ASSERT_EQ(::mkfifo((folder / "p").c_str(), 0600), 0);
  EXPECT_EQ(thrown([&] { local_storage().open_read(folder / "p"); }).kind(), ErrorKind::kIo);
}

TEST(Text, IsWrittenWholeAndReadWithinALimit) {
  TestFolder folder;
  write_text_atomic(local_storage(), folder / "t", "one");
  write_text_atomic(local_storage(), folder / "t", "two");
  EXPECT_EQ(read_text(local_storage(), folder / "t"), "two");
  EXPECT_EQ(thrown([&] { read_text(local_storage(), folder / "t", 2); }).kind(), ErrorKind::kCorrupt);
  EXPECT_THAT(local_storage().list(folder.path()), ElementsAre("t"));
}

TEST(Paths, JoinAndTakeApart) {
  EXPECT_EQ(join("a", "b"), "a/b");
  EXPECT_EQ(join("a/", "b"), "a/b");
  EXPECT_EQ(join("", "b"), "b");
  EXPECT_EQ(base_name("/x/y/"), "y");
  EXPECT_EQ(base_name("y"), "y");
  EXPECT_EQ(parent("/x/y/"), "/x");
  EXPECT_EQ(parent("/x"), "/");
  EXPECT_EQ(parent("y"), ".");
}

TEST(Faulty, CountsAndLogsTheChangingCalls) {
  TestFolder folder;
  FaultyStorage s(local_storage());
  write_text_atomic(s, folder / "t", "x");
  s.make_directory(folder / "d");
  s.remove_directory(folder / "d");
  EXPECT_THAT(s.log(), ElementsAre("create", "write", "sync", "rename", "sync_directory", "mkdir", "remove"));
  EXPECT_EQ(s.calls(), 7);
}

int exit_status(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      body();
    } catch (...) {
      ::_exit(99);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Faulty, KillEndsTheProcessBeforeTheCall) {
  for (int64_t at = 0; at < 5; ++at) {
    TestFolder folder;
    put_file(folder / "t", "old");
    EXPECT_EQ(exit_status([&] {
                FaultyStorage s(local_storage(), {Kind::kKill, at});
                write_text_atomic(s, folder / "t", "new");
              }),
              137);
    EXPECT_EQ(get_file(folder / "t"), at <= 3 ? "old" : "new");
  }
}

TEST(Faulty, KillHalfLeavesHalfOfAWrite) {
  TestFolder folder;
  EXPECT_EQ(exit_status([&] {
              FaultyStorage s(local_storage(), {Kind::kKillHalf, 1});
              const auto file = s.create(folder / "t", Access::kBuffered, 0);
              file->write(0, std::as_bytes(std::span(std::string_view("12345678"))));
            }),
            137);
  EXPECT_EQ(get_file(folder / "t"), "1234");
}

TEST(Faulty, NoSpaceStaysAndLeavesRemovalPossible) {
  TestFolder folder;
  FaultyStorage s(local_storage(), {Kind::kNoSpace, 1});
  const Error e = thrown([&] { write_text_atomic(s, folder / "t", "12345678"); });
  EXPECT_EQ(e.kind(), ErrorKind::kIo);
  EXPECT_THAT(e.what(), HasSubstr("ENOSPC"));
  EXPECT_TRUE(local_storage().list(folder.path()).empty());
  EXPECT_EQ(thrown([&] { s.create(folder / "u", Access::kBuffered, 0); }).kind(), ErrorKind::kIo);
}

TEST(Faulty, OneErrorOneShortReadOneFailingSync) {
  TestFolder folder;
  put_file(folder / "t", "12345678");
  FaultyStorage once(local_storage(), {Kind::kIoError, 0});
  EXPECT_THAT(thrown([&] { once.make_directory(folder / "d"); }).what(), HasSubstr("EIO"));
  EXPECT_NO_THROW(once.make_directory(folder / "d"));

  FaultyStorage shorter(local_storage(), {Kind::kShortRead, 1});
  std::vector<std::byte> bytes(8);
  const auto file = shorter.open_read(folder / "t", Access::kBuffered);
  EXPECT_NO_THROW(file->read(0, bytes));
  EXPECT_EQ(thrown([&] { file->read(0, bytes); }).kind(), ErrorKind::kCorrupt);
  EXPECT_NO_THROW(file->read(0, bytes));

  FaultyStorage unsynced(local_storage(), {Kind::kSyncFails, 0});
  EXPECT_THAT(thrown([&] { write_text_atomic(unsynced, folder / "t", "new"); }).what(), HasSubstr("fsync"));
  EXPECT_EQ(get_file(folder / "t"), "12345678");
  EXPECT_NO_THROW(write_text_atomic(unsynced, folder / "t", "new"));

  FaultyStorage plain(local_storage(), {Kind::kNoExchange, -1});
  EXPECT_FALSE(plain.exchange(folder / "t", folder / "d"));
}

}  // namespace
}  // namespace shardsmith
