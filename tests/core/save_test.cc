#include "checkpoint/save.h"

#include <gmock/gmock.h>

#include "checkpoint_fixture.h"
#include "memory_storage.h"
#include "storage/faulty_storage.h"

namespace shardsmith {
namespace {

using testing::HasSubstr;

// All ranks failed, with the same words.
std::string error_of(const SaveOutcome& outcome, ErrorKind kind, int rank) {
  for (const auto& error : outcome.errors) {
    EXPECT_TRUE(error.has_value());
    if (!error) return "";
    EXPECT_EQ(error->kind(), kind) << error->what();
    EXPECT_EQ(error->rank(), rank);
    EXPECT_STREQ(error->what(), outcome.errors[0]->what());
  }
  return outcome.errors[0]->what();
}

TEST(Save, WritesTheFolderThatTheDocumentsDescribe) {
  MemoryStorage storage;
  const TestState state{"step5", 5, 2};
  const SaveOutcome outcome = save(storage, state, "out");
  ASSERT_TRUE(outcome.succeeded());
  EXPECT_EQ(outcome.results[1]->folder, "out/step5_partial");
  EXPECT_EQ(storage.list("out"), (std::vector<std::string>{"newest", "step5_partial"}));
  EXPECT_EQ(storage.list("out/step5_partial"),
            (std::vector<std::string>{"manifest.json", "model_0_0.pt", "model_1_0.pt", "optimizer_0_0.pt",
                                      "optimizer_1_0.pt", "rng_0.pt", "rng_1.pt", "user_content.pt"}));
  EXPECT_EQ(read_text(storage, "out/newest"), "step5_partial\n");
  const Manifest manifest = read_manifest(storage, "out/step5_partial");
  EXPECT_EQ(manifest.tag, "step5");
  EXPECT_EQ(manifest.pp, 2);
  EXPECT_EQ(manifest.files.size(), 7u);
  EXPECT_EQ(manifest.partition.first, (std::vector<int>{0, 1, 2}));
  uint64_t bytes = 0;
  for (const ManifestFile& file : manifest.files) bytes += storage.stat("out/step5_partial/" + file.name).size;
  EXPECT_EQ(outcome.results[0]->bytes, bytes);
}

TEST(Save, RanksThatDisagreeAreNamedBeforeAnythingIsWritten) {
  struct Case {
    std::function<void(SaveRequest&)> change;
    const char* text;
  };
  const Case cases[] = {
      {[](SaveRequest& r) { r.tag = "step6"; }, "rank 1 saves tag \"step6\" but rank 0 saves tag \"step5\""},
      {[](SaveRequest& r) { r.path = "elsewhere"; }, "rank 1 saves path \"elsewhere\" but rank 0 saves path \"out\""},
      {[](SaveRequest& r) { r.manifest.step = 7; }, "rank 1 saves step 7 but rank 0 saves step 5"},
      {[](SaveRequest& r) {
         r.manifest.partition.first = {0, 2, 2};
       },
       "rank 1 saves partition"},
      {[](SaveRequest& r) { r.files[0].name = "model_0_0.pt"; }, "model_0_0.pt, which another file is called too"},
  };
  for (const Case& c : cases) {
    MemoryStorage storage;
    const SaveOutcome outcome = save(storage, {"step5", 5, 2}, "out", [&](int rank, SaveRequest& r) {
      if (rank == 1) c.change(r);
    });
    EXPECT_THAT(error_of(outcome, ErrorKind::kInvalidArgument, 1), HasSubstr(c.text));
    EXPECT_EQ(storage.calls(), 0);
  }
}

TEST(Save, AnEmptyPathOrABadTagOnOneRankIsEverybodysError) {
  for (const char* tag : {"", "a/b", "..", ".hidden", "two\nlines"}) {
    MemoryStorage storage;
    const SaveOutcome outcome = save(storage, {"step5", 5, 2}, "out", [&](int rank, SaveRequest& r) {
      if (rank == 1) r.tag = tag;
    });
    EXPECT_THAT(error_of(outcome, ErrorKind::kInvalidArgument, 1), HasSubstr("rank 1: tag"));
    EXPECT_EQ(storage.calls(), 0);
  }
  MemoryStorage storage;
  EXPECT_THAT(error_of(save(storage, {"t", 5, 2}, "out",
                            [](int rank, SaveRequest& r) {
                              if (rank == 1) r.path = "";
                            }),
                       ErrorKind::kInvalidArgument, 1),
              HasSubstr("folder to save to is empty"));
}

TEST(Save, AnAbsentRankIsNamedInTime) {
  MemoryStorage storage;
  auto peers = make_thread_peers(2);  // rank 1 never comes
  RankFiles files({"t", 1, 2}, 0, "out");
  files.request.deadline = std::chrono::milliseconds(100);
  try {
    save_partial(storage, *peers[0], files.request);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kTimeout);
    EXPECT_THAT(e.what(), HasSubstr("rank 1"));
  }
}

TEST(Save, ARankThatIsLateWhileWritingIsNamedAndTheNextSaveSweeps) {
  MemoryStorage storage;
  std::vector<std::byte> bytes(64);
  const auto slow = [&](int rank, SaveRequest& r) {
    r.deadline = std::chrono::milliseconds(200);
    if (rank != 1) return;
    r.files[0].content.storages[0] = {r.files[0].content.storages[0].size, nullptr,
                                      [](uint64_t, std::span<std::byte> out) {
                                        std::this_thread::sleep_for(std::chrono::milliseconds(600));
                                        std::fill(out.begin(), out.end(), std::byte{0});
                                      }};
  };
  const SaveOutcome outcome = save(storage, {"t", 1, 2}, "out", slow);
  ASSERT_TRUE(outcome.errors[0]);
  EXPECT_EQ(outcome.errors[0]->kind(), ErrorKind::kTimeout);
  EXPECT_THAT(outcome.errors[0]->what(), HasSubstr("rank 1"));
  EXPECT_TRUE(scan(storage, "out").empty());
  ASSERT_TRUE(save(storage, {"t", 1, 2}, "out").succeeded());
  EXPECT_TRUE(leftovers(storage, "out").empty());
}

TEST(Save, ARankThatFailsToReadItsTensorIsEverybodysError) {
  MemoryStorage storage;
  const auto failing = [](int rank, SaveRequest& r) {
    if (rank != 1) return;
    r.files[0].content.storages[0] = {r.files[0].content.storages[0].size, nullptr,
                                      [](uint64_t, std::span<std::byte>) { throw std::runtime_error("device lost"); }};
  };
  EXPECT_THAT(error_of(save(storage, {"t", 1, 2}, "out", failing), ErrorKind::kIo, 1),
              HasSubstr("rank 1: device lost"));
  EXPECT_TRUE(storage.list("out").empty());
}

class FullStorage final : public ForwardingStorage {
 public:
  using ForwardingStorage::ForwardingStorage;
  uint64_t free_bytes(const std::string&) override { return 5000; }
};

TEST(Save, TooLittleSpaceIsFoundOutBeforeWriting) {
  MemoryStorage memory;
  FullStorage storage(memory);
  EXPECT_THAT(error_of(save(storage, {"t", 1, 2}, "out"), ErrorKind::kNoSpace, 0), HasSubstr("nothing was written"));
  EXPECT_TRUE(memory.list("out").empty());
}

TEST(Save, AForeignFolderOfThatNameIsLeftAlone) {
  MemoryStorage storage;
  storage.make_directory("out/t_partial");
  storage.create("out/t_partial/thesis.tex", Access::kBuffered, 0);
  EXPECT_THAT(error_of(save(storage, {"t", 1, 1}, "out"), ErrorKind::kInvalidArgument, -1),
              HasSubstr("out/t_partial is there but is no checkpoint of ours"));
  EXPECT_TRUE(storage.stat("out/t_partial/thesis.tex").exists);
}

TEST(Save, TheSameTagAgainReplacesIt) {
  for (bool exchange : {true, false}) {
    MemoryStorage storage(exchange);
    ASSERT_TRUE(save(storage, {"t", 1, 2}, "out").succeeded());
    const TestState wider{"t", 2, 1};  // fewer files: none of the old ones may stay
    ASSERT_TRUE(save(storage, wider, "out").succeeded());
    EXPECT_TRUE(leftovers(storage, "out").empty());
    EXPECT_EQ(storage.list("out/t_partial").size(), 5u);
    expect_whole(storage, *find_checkpoint(storage, "out", "", nullptr), wider);
  }
}

TEST(Save, OnRealFilesTensorsOfSeveralBlocksComeBack) {
  QuickFolder folder;
  TestState state{"big", 3, 2};
  state.shape = {700, 1001};  // 2.8 MB
  ASSERT_TRUE(save(local_storage(), state, folder.path()).succeeded());
  expect_whole(local_storage(), *find_checkpoint(local_storage(), folder.path(), "", nullptr), state);
}

TEST(Save, AnotherModelsFolderIsRefusedAndSaysWhatDiffers) {
  MemoryStorage storage;
  const auto config = [](const char* text) { return parse_json(text, "test"); };
  const Value ours = config(R"({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "vocab_size": 50257})");
  check_same_model(storage, "out", ours);  // nothing there yet
  ASSERT_TRUE(
      save(storage, {"t", 1, 1}, "out", [&](int, SaveRequest& r) { r.manifest.model_config = ours; }).succeeded());
  check_same_model(storage, "out", ours);
  try {
    check_same_model(
        storage, "out",
        config(R"({"model_type": "llama", "hidden_size": 768, "num_hidden_layers": 30, "vocab_size": 50257})"));
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(exit_code(e.kind()), 2);
    EXPECT_THAT(e.what(), HasSubstr("model_type \"gpt2\" there and \"llama\" here, layers 12 there and 30 here"));
    EXPECT_THAT(e.what(), testing::Not(HasSubstr("vocabulary")));
  }
}

}  // namespace
}  // namespace shardsmith
