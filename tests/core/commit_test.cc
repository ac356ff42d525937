#include "checkpoint/commit.h"

#include <gmock/gmock.h>

#include "checkpoint_fixture.h"
#include "memory_storage.h"
#include "storage/faulty_storage.h"

namespace shardsmith {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

void put(Storage& storage, const std::string& path, const std::string& bytes) {
  storage.create(path, Access::kBuffered, 0)->write(0, std::as_bytes(std::span(bytes)));
}

Manifest some_manifest() {
  Manifest m;
  m.save_id = "0123456789abcdef";
  m.tag = "t";
  m.step = 40;
  m.time = 1764000000.25;
  m.world_size = 4, m.pp = 2, m.rdp = 2;
  m.partition.first = {0, 5, 9};
  m.model_config = parse_json(R"({"model_type": "gpt2", "n_embd": 8, "rate": 1e-05, "none": null})", "test");
  m.hf = "hf";
  m.files = {{"model_0_0.pt", uint64_t{1} << 40, "89abcdef"}, {"model_1_0.pt", 7, "01234567"}};
  return m;
}

TEST(Manifest, ComesBackAsItWas) {
  MemoryStorage storage;
  const Manifest m = some_manifest();
  storage.make_directory("f");
  put(storage, "f/manifest.json", to_json_text(m));
  const Manifest back = read_manifest(storage, "f");
  EXPECT_EQ(to_json_text(back), to_json_text(m));
  EXPECT_EQ(back.partition, m.partition);
  EXPECT_EQ(back.files[0].size, uint64_t{1} << 40);
  EXPECT_EQ(back.model_config, m.model_config);
  EXPECT_EQ(back.time, m.time);
}

TEST(Manifest, HostileAndNewerOnesAreRefused) {
  MemoryStorage storage;
  storage.make_directory("f");
  const std::string good = to_json_text(some_manifest());
  const auto refused = [&](const std::string& from, const std::string& to, ErrorKind kind) {
    std::string text = good;
    ASSERT_NE(text.find(from), std::string::npos) << from;
    text.replace(text.find(from), from.size(), to);
    put(storage, "f/manifest.json", text);
    try {
      read_manifest(storage, "f");
      ADD_FAILURE() << to;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), kind) << e.what();
      EXPECT_THAT(e.what(), HasSubstr("f/manifest.json"));
    }
  };
  refused("\"format_version\": 1", "\"format_version\": 2", ErrorKind::kUnsupported);
  refused("model_0_0.pt", "../../etc/passwd", ErrorKind::kCorrupt);
  refused("model_0_0.pt", "model_1_0.pt", ErrorKind::kCorrupt);
  refused("\"size\": 7", "\"size\": -7", ErrorKind::kCorrupt);
  refused("\"pp\": 2", "\"pp\": 3", ErrorKind::kCorrupt);
  refused("\"step\"", "\"pets\"", ErrorKind::kCorrupt);
  refused("}", "", ErrorKind::kCorrupt);
}

TEST(Recover, PutsOldBackWhereTheNameIsMissingOrDamaged) {
  MemoryStorage storage;
  const TestState old{"t", 1, 1};
  ASSERT_TRUE(save(storage, old, "out").succeeded());
  storage.rename("out/t_partial", "out/.t_partial.old");
  // A scan finds it where it is, before anything is repaired.
  const auto found = find_checkpoint(storage, "out", "", nullptr);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->name, "t_partial");
  EXPECT_EQ(found->folder, "out/.t_partial.old");
  expect_whole(storage, *found, old);
  storage.make_directory("out/t_partial");  // without a manifest
  put(storage, "out/t_partial/model_0_0.pt", "half");
  expect_whole(storage, *find_checkpoint(storage, "out", "", nullptr), old);
  recover(storage, "out");
  EXPECT_THAT(leftovers(storage, "out"), IsEmpty());
  expect_whole(storage, *find_checkpoint(storage, "out", "t", nullptr), old);
}

TEST(Recover, SweepsOnlyWhatItKnows) {
  MemoryStorage storage;
  const TestState state{"t", 1, 1};
  ASSERT_TRUE(save(storage, state, "out").succeeded());
  const std::string id = "0123456789abcdef";
  for (const std::string& dead : {".t_partial.tmp-" + id, ".u_partial.gone-" + id, ".exchange-probe-" + id + "-a"}) {
    storage.make_directory("out/" + dead + "/below");
  }
  put(storage, "out/.newest.tmp-12-0", "x");
  for (const char* foreign : {".git", ".thesis.old", ".t_partial.tmp-mine", ".cache.tmp-0123"}) {
    storage.make_directory(std::string("out/") + foreign);
  }
  put(storage, "out/.nfs0001", "x");
  recover(storage, "out");
  EXPECT_THAT(leftovers(storage, "out"),
              ElementsAre(".cache.tmp-0123", ".git", ".nfs0001", ".t_partial.tmp-mine", ".thesis.old"));
  expect_whole(storage, *find_checkpoint(storage, "out", "", nullptr), state);
}

TEST(Recover, AnErrorOfTheDiskIsNoReasonToThrowACheckpointAway) {
  // The name can't be read at all: an EIO here must not make .old or the name disappear.
  class Unreadable final : public ForwardingStorage {
   public:
    using ForwardingStorage::ForwardingStorage;
    std::unique_ptr<ReadFile> open_read(const std::string& path, Access access) override {
      if (path == "out/t_partial/manifest.json") fail(ErrorKind::kIo, path, ": reading failed (EIO)");
      return base.open_read(path, access);
    }
  };
  MemoryStorage storage;
  ASSERT_TRUE(save(storage, {"t", 1, 1}, "out").succeeded());
  storage.rename("out/t_partial", "out/.t_partial.old");
  ASSERT_TRUE(save(storage, {"u", 2, 1}, "out").succeeded());  // puts t back
  storage.make_directory("out/.t_partial.old");
  Unreadable broken(storage);
  EXPECT_THROW(recover(broken, "out"), Error);
  EXPECT_TRUE(storage.stat("out/t_partial/manifest.json").exists);
}

TEST(Prune, KeepsTheNewestAndWhatWasJustSaved) {
  MemoryStorage storage;
  const auto save_keeping = [&](const std::string& tag, int64_t step, std::optional<int> keep) {
    const SaveOutcome outcome =
        save(storage, {tag, step, 1}, "out", [&](int, SaveRequest& r) { r.num_kept_partial_checkpoints = keep; });
    EXPECT_TRUE(outcome.succeeded());
    return outcome.results[0]->pruned;
  };
  EXPECT_THAT(save_keeping("a", 10, std::nullopt), IsEmpty());
  EXPECT_THAT(save_keeping("b", 20, -1), IsEmpty());
  EXPECT_THAT(save_keeping("old_run", 900, 3), IsEmpty());
  storage.make_directory("out/theirs_partial");
  put(storage, "out/theirs_partial/model_0_0.pt", "of another tool");
  // A run that starts again below: what it saves survives, and so do the newest others.
  EXPECT_THAT(save_keeping("c", 5, 3), ElementsAre("a_partial"));
  EXPECT_THAT(save_keeping("d", 6, 1), testing::UnorderedElementsAre("b_partial", "old_run_partial", "c_partial"));
  EXPECT_EQ(storage.list("out"), (std::vector<std::string>{"d_partial", "newest", "theirs_partial"}));
}

TEST(Exchange, IsProbedWithContentsAndTheProbeLeavesNothing) {
  MemoryStorage with, without(false);
  with.make_directory("out"), without.make_directory("out");
  EXPECT_TRUE(exchange_works(with, "out"));
  EXPECT_FALSE(exchange_works(without, "out"));
  EXPECT_THAT(with.list("out"), IsEmpty());
  EXPECT_THAT(without.list("out"), IsEmpty());
}

TEST(Exchange, OneThatDestroysOrOnlyPretendsIsNotTrusted) {
  class Pretender final : public ForwardingStorage {
   public:
    using ForwardingStorage::ForwardingStorage;
    bool exchange(const std::string&, const std::string&) override { return true; }
  };
  class Destroyer final
      : public ForwardingStorage {  // renames over the target, as was seen with one network file system
   public:
    using ForwardingStorage::ForwardingStorage;
    bool exchange(const std::string& a, const std::string& b) override {
      remove_tree(base, b);
      base.rename(a, b);
      return true;
    }
  };
  const TestState first{"t", 1, 1}, second{"t", 2, 1};
  const auto survives = [&](Storage& storage) {
    EXPECT_FALSE(exchange_works(storage, "out"));
    ASSERT_TRUE(save(storage, second, "out").succeeded());
    EXPECT_THAT(leftovers(storage, "out"), IsEmpty());
    expect_whole(storage, *find_checkpoint(storage, "out", "", nullptr), second);
  };
  MemoryStorage a, b;
  ASSERT_TRUE(save(a, first, "out").succeeded());
  ASSERT_TRUE(save(b, first, "out").succeeded());
  Pretender pretender(a);
  survives(pretender);
  Destroyer destroyer(b);
  survives(destroyer);
}

}  // namespace
}  // namespace shardsmith
