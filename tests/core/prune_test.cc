// Removing checkpoints by name, where the disk fails or the process dies in the middle of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checkpoint_fixture.h"
#include "storage/faulty_storage.h"

namespace shardsmith {
namespace {

using testing::ElementsAre;

std::vector<std::string> complete_in(const std::string& path) {
  std::vector<std::string> names;
  for (const Found& found : scan(local_storage(), path)) {
    EXPECT_TRUE(found.complete) << found.why_not;
    names.push_back(found.name);
  }
  return names;
}

std::string three_checkpoints(const QuickFolder& folder, const std::string& name) {
  const std::string path = folder.path() + "/" + name;
  for (const auto& [tag, step] : {std::pair("a", 1), {"b", 2}, {"c", 3}}) {
    EXPECT_TRUE(save(local_storage(), TestState{.tag = tag, .step = step}, path).succeeded());
  }
  return path;
}

TEST(RemoveCheckpoints, NamedOnesGoAndTheOthersStay) {
  const QuickFolder folder;
  const std::string path = three_checkpoints(folder, "out");
  remove_checkpoints(local_storage(), path, {"a_partial", "b_partial"});
  EXPECT_THAT(complete_in(path), ElementsAre("c_partial"));
  EXPECT_THAT(local_storage().list(path), ElementsAre("c_partial", "newest"));
}

TEST(RemoveCheckpoints, AnErrorAtAnyCallLeavesEachWholeOrNameless) {
  const QuickFolder folder;
  for (int64_t at = 0;; ++at) {
    const std::string path = three_checkpoints(folder, "out" + std::to_string(at));
    FaultyStorage faulty(local_storage(), {Fault::Kind::kIoError, at});
    bool failed = false;
    try {
      remove_checkpoints(faulty, path, {"a_partial", "b_partial"});
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kIo);
      failed = true;
    }
    for (const std::string& name : complete_in(path)) EXPECT_NE(name, "") << "call " << at;
    EXPECT_EQ(scan(local_storage(), path).front().name, "c_partial") << "call " << at;
    // What has lost its name is swept by the next save.
    recover(local_storage(), path);
    for (const std::string& name : local_storage().list(path)) EXPECT_FALSE(name.starts_with('.')) << name;
    if (!failed) {
      EXPECT_GT(at, 4);
      EXPECT_THAT(complete_in(path), ElementsAre("c_partial"));
      break;
    }
  }
}

TEST(RemoveCheckpoints, AProcessThatDiesAtAnyCallLeavesEachWholeOrNameless) {
  const QuickFolder folder;
  for (int64_t at = 0;; ++at) {
    const std::string path = three_checkpoints(folder, "out" + std::to_string(at));
    const pid_t child = ::fork();
    if (child == 0) {
      FaultyStorage faulty(local_storage(), {Fault::Kind::kKill, at});
      remove_checkpoints(faulty, path, {"a_partial", "b_partial"});
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    complete_in(path);
    EXPECT_EQ(scan(local_storage(), path).front().name, "c_partial") << "call " << at;
    if (WEXITSTATUS(status) == 0) {
      EXPECT_THAT(complete_in(path), ElementsAre("c_partial"));
      break;
    }
    ASSERT_EQ(WEXITSTATUS(status), 137);
  }
}

}  // namespace
}  // namespace shardsmith
