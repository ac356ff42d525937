#include "checkpoint/load.h"

#include <gmock/gmock.h>

#include "checkpoint_fixture.h"
#include "memory_storage.h"
#include "storage/faulty_storage.h"

namespace shardsmith {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

void flip(Storage& storage, const std::string& path, uint64_t at) {
  std::string bytes = read_text(storage, path);
  bytes.at(at) ^= 0x10;
  storage.create(path, Access::kBuffered, 0)->write(0, std::as_bytes(std::span(bytes)));
}
void put(Storage& storage, const std::string& path, const std::string& bytes) {
  storage.create(path, Access::kBuffered, 0)->write(0, std::as_bytes(std::span(bytes)));
}
std::vector<std::string> names(const std::vector<Found>& all) {
  std::vector<std::string> result;
  for (const Found& found : all) result.push_back(found.name);
  return result;
}

TEST(Scan, OrdersByStepAndNotByName) {
  MemoryStorage storage;
  for (const TestState& state : {TestState{"z", 2, 1}, TestState{"best", 30, 1}, TestState{"step100", 4, 1}}) {
    ASSERT_TRUE(save(storage, state, "out").succeeded());
  }
  storage.make_directory("out/hf");
  storage.make_directory("out/dead_partial");
  const std::vector<Found> all = scan(storage, "out");
  EXPECT_THAT(names(all), ElementsAre("best_partial", "step100_partial", "z_partial", "dead_partial"));
  EXPECT_TRUE(all[1].newest);
  EXPECT_FALSE(all[0].newest);
  EXPECT_FALSE(all[3].complete);
  EXPECT_EQ(all[3].why_not, "no manifest.json");
  EXPECT_GT(all[0].bytes, 2000u);
  EXPECT_THROW(scan(storage, "nowhere"), Error);
}

TEST(Find, FollowsNewestThenTheOrderAndSaysWhatItPassedOver) {
  MemoryStorage storage;
  for (const TestState& state : {TestState{"a", 1, 1}, TestState{"b", 2, 1}, TestState{"c", 3, 1}}) {
    ASSERT_TRUE(save(storage, state, "out").succeeded());
  }
  EXPECT_EQ(find_checkpoint(storage, "out", "", nullptr)->name, "c_partial");
  EXPECT_EQ(find_checkpoint(storage, "out", "a", nullptr)->name, "a_partial");
  EXPECT_EQ(find_checkpoint(storage, "out", "a_partial", nullptr)->name, "a_partial");
  EXPECT_FALSE(find_checkpoint(storage, "out", "d", nullptr));
  put(storage, "out/newest", "a");  // a tag serves too
  EXPECT_EQ(find_checkpoint(storage, "out", "", nullptr)->name, "a_partial");
  for (const char* bad : {"../elsewhere", "newest", "", "gone_partial\n"}) {
    put(storage, "out/newest", bad);
    EXPECT_EQ(find_checkpoint(storage, "out", "", nullptr)->name, "c_partial") << bad;
  }
  put(storage, "out/newest", "c_partial\n");
  put(storage, "out/c_partial/rng_0.pt", "");  // as after a power cut
  std::vector<std::string> passed;
  EXPECT_EQ(find_checkpoint(storage, "out", "", &passed)->name, "b_partial");
  EXPECT_THAT(passed, ElementsAre(HasSubstr("rng_0.pt has 0 bytes")));
  passed.clear();
  EXPECT_FALSE(find_checkpoint(storage, "out", "c", &passed));
  EXPECT_THAT(passed, ElementsAre(HasSubstr("c_partial: ")));
}

TEST(Find, FilesOfTwoSavesAreNoCheckpoint) {
  MemoryStorage storage;
  ASSERT_TRUE(save(storage, {"a", 1, 2}, "out").succeeded());
  ASSERT_TRUE(save(storage, {"b", 2, 2}, "out").succeeded());
  put(storage, "out/b_partial/model_1_0.pt", read_text(storage, "out/a_partial/model_1_0.pt"));
  std::vector<std::string> passed;
  EXPECT_EQ(find_checkpoint(storage, "out", "", &passed)->name, "a_partial");
  EXPECT_THAT(passed, ElementsAre(HasSubstr("has digest")));
  EXPECT_THROW(read_partial(storage, "out/b_partial", read_manifest(storage, "out/b_partial")), Error);
}

TEST(ReadPartial, AMissingFileIsNamed) {
  MemoryStorage storage;
  ASSERT_TRUE(save(storage, {"a", 1, 2}, "out").succeeded());
  Manifest manifest = read_manifest(storage, "out/a_partial");
  storage.remove_file("out/a_partial/model_1_0.pt");
  try {
    read_partial(storage, "out/a_partial", manifest);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kCorrupt);
    EXPECT_THAT(e.what(), HasSubstr("model_1_0.pt is missing"));
  }
}

// One tensor in two halves, by two tensor-parallel ranks.
TEST(ReadPartial, SlicesOfSeveralFilesMakeOneTensor) {
  MemoryStorage storage;
  const auto split = [](int rank, SaveRequest& r) {
    for (int f : {0, 1}) {
      PtTensor& tensor = r.files[static_cast<size_t>(f)].content.tensors[0];
      tensor.name = f == 0 ? "model/w" : "optimizer/state/w/exp_avg";
      tensor.global = {16, 33};
      tensor.box = {{8 * rank, 0}, {8, 33}};
    }
  };
  ASSERT_TRUE(save(storage, {"a", 1, 2}, "out", split).succeeded());
  const Index index = read_partial(storage, "out/a_partial", read_manifest(storage, "out/a_partial"));
  ASSERT_TRUE(index.find("model/w"));
  EXPECT_EQ(index.find("model/w")->shape, (Shape{16, 33}));
  EXPECT_EQ(index.find("model/w")->slices.size(), 2u);
  EXPECT_TRUE(index.find("optimizer/state/w/exp_avg"));
  // Only one half: an error, never half a tensor.
  Manifest half = read_manifest(storage, "out/a_partial");
  std::erase_if(half.files, [](const ManifestFile& f) { return f.name == "model_1_0.pt"; });
  EXPECT_THROW(read_partial(storage, "out/a_partial", half), Error);
}

TEST(ReadPartial, ValuesReferToTheWholeCheckpointsTensors) {
  MemoryStorage storage;
  const TestState state{"a", 1, 3};
  ASSERT_TRUE(save(storage, state, "out").succeeded());
  const Index index = read_partial(storage, "out/a_partial", read_manifest(storage, "out/a_partial"));
  for (int r = 0; r < 3; ++r) {
    const TensorRef* ref = index.values.find("model")->find(state.weight(r))->get_if<TensorRef>();
    ASSERT_TRUE(ref);
    EXPECT_EQ(index.tensors.at(ref->index).name, "model/" + state.weight(r));
    const Value& optimizer = index.values.find("optimizer")->get_if<List>()->at(static_cast<size_t>(r));
    const Value& moments = *optimizer.find("state")->find(state.weight(r));
    EXPECT_EQ(index.tensors.at(moments.find("exp_avg")->get_if<TensorRef>()->index).name,
              "optimizer/state/" + state.weight(r) + "/exp_avg");
    EXPECT_EQ(*moments.find("step"), Value(1));
  }
}

TEST(Verify, EveryFlippedByteOfATensorIsFoundAndNamed) {
  MemoryStorage storage;
  const TestState state{"a", 1, 2};
  ASSERT_TRUE(save(storage, state, "out").succeeded());
  const Manifest manifest = read_manifest(storage, "out/a_partial");
  EXPECT_THAT(verify_partial(storage, "out/a_partial", manifest), IsEmpty());
  const std::string path = "out/a_partial/model_1_0.pt", good = read_text(storage, path);
  const size_t begin = good.find(state.bytes("weight", 1, state.shape));
  ASSERT_NE(begin, std::string::npos);
  for (size_t at : {begin, begin + 500, begin + 1055}) {
    flip(storage, path, at);
    EXPECT_THAT(verify_partial(storage, "out/a_partial", manifest),
                ElementsAre(testing::AllOf(HasSubstr(path), HasSubstr("'model/" + state.weight(1) + "'"))));
    put(storage, path, good);
  }
  // Anywhere else in the file too.
  for (size_t at = 0; at < good.size(); at += 1 + good.size() / 150) {
    flip(storage, path, at);
    EXPECT_THAT(verify_partial(storage, "out/a_partial", manifest), testing::Not(IsEmpty())) << "byte " << at;
    put(storage, path, good);
  }
  put(storage, path, good.substr(0, good.size() / 2));
  EXPECT_THAT(verify_partial(storage, "out/a_partial", manifest), ElementsAre(HasSubstr("the manifest says")));
}

TEST(Verify, DamagedNeighboursAreOneLineAndProgressCountsBytes) {
  QuickFolder folder;
  TestState state{"a", 1, 1};
  state.shape = {1200, 1001};  // five blocks
  Storage& storage = local_storage();
  ASSERT_TRUE(save(storage, state, folder.path()).succeeded());
  const std::string at = join(folder.path(), "a_partial"), path = join(at, "model_0_0.pt");
  for (uint64_t block : {1, 2, 4}) flip(storage, path, (block << 20) + 77);
  uint64_t done = 0, total = 0;
  const Manifest manifest = read_manifest(storage, at);
  const std::vector<std::string> damage =
      verify_partial(storage, at, manifest, [&](const ProgressEvent& e) { done = e.done, total = e.total; });
  EXPECT_THAT(damage, ElementsAre(HasSubstr("(blocks 1 to 2)"), HasSubstr("(block 4)")));
  EXPECT_EQ(done, total);
}

}  // namespace
}  // namespace shardsmith
