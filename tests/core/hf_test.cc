// Hugging Face folders: one file or sharded; weight maps that lie.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "format/hf.h"
#include "format/pt.h"
#include "test_files.h"

namespace shardsmith {
namespace {

using ::testing::HasSubstr;

class Hf : public ::testing::Test {
 protected:
  void SetUp() override { put_file(folder_ / "config.json", R"({"model_type":"gpt2"})"); }

  void tensors(const std::string& file, const std::vector<std::string>& names) {
    std::vector<SafetensorsTensor> list;
    for (const auto& name : names)
      list.push_back({name, Dtype::kF32, {6}, {24, reinterpret_cast<const std::byte*>(values_.data()), {}}});
    write_safetensors(local_storage(), folder_ / file, list, {});
  }
  void map(const std::string& json) {
    put_file(folder_ / "model.safetensors.index.json", R"({"weight_map":)" + json + "}");
  }
  Error error() {
    return thrown([&] { read_hf(local_storage(), folder_.path()); });
  }

  TestFolder folder_;
  std::vector<float> values_ = counted<float>(6);
};

TEST_F(Hf, OneFileIsRead) {
  EXPECT_FALSE(is_hf(local_storage(), folder_.path()));
  EXPECT_EQ(error().kind(), ErrorKind::kNotFound);
  tensors("model.safetensors", {"a", "b"});
  EXPECT_TRUE(is_hf(local_storage(), folder_.path()));
  const Index index = read_hf(local_storage(), folder_.path());
  EXPECT_EQ(read_tensor<float>(index, "b"), values_);
  EXPECT_EQ(*index.values.find("model_type"), Value("gpt2"));
}

TEST_F(Hf, ShardsAreJoined) {
  tensors("model-00001-of-00002.safetensors", {"a"});
  tensors("model-00002-of-00002.safetensors", {"b", "c"});
  map(R"({"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors","c":"model-00002-of-00002.safetensors"})");
  const Index index = read_hf(local_storage(), folder_.path());
  validate(index);
  EXPECT_EQ(index.files.size(), 2u);
  for (const char* name : {"a", "b", "c"}) EXPECT_EQ(read_tensor<float>(index, name), values_);
}

TEST_F(Hf, BinFilesAreRead) {
  PtContent content;
  content.storages = {{24, reinterpret_cast<const std::byte*>(values_.data()), {}}};
  content.tensors = {{Dtype::kF32, 0, 0, {6}, {1}}};
  content.value.set("x.weight", Value(TensorRef{0}));
  content.with_slices = false;
  write_pt(local_storage(), folder_ / "pytorch_model.bin", content);
  EXPECT_EQ(read_tensor<float>(read_hf(local_storage(), folder_.path()), "x.weight"), values_);
}

TEST_F(Hf, PathsOutOfTheFolderAreRefusedUnopened) {
  TestFolder other;
  std::filesystem::create_symlink(other / "secret", folder_ / "link.safetensors");
  for (const char* name : {"../secret", "/etc/passwd", "a/b", "..", ".", "", "link.safetensors", "a\\\\b"}) {
    map(str(R"({"a":")", name, "\"}"));
    const Error e = error();
    EXPECT_EQ(e.kind(), ErrorKind::kCorrupt) << name;
    EXPECT_THAT(e.what(), HasSubstr("refused")) << name;
  }
}

// As huggingface_hub lays out a revision: links into the repository's own blobs, and no other links.
TEST_F(Hf, ARevisionInTheCacheIsRead) {
  const std::string snapshot = folder_ / "snapshots/abc", blobs = folder_ / "blobs";
  for (const std::string& made : {snapshot, blobs}) local_storage().make_directory(made);
  tensors("blobs/0123abc", {"a"});
  std::filesystem::create_symlink("../../blobs/0123abc", snapshot + "/s1");
  put_file(snapshot + "/config.json", "{}");
  put_file(snapshot + "/model.safetensors.index.json", R"({"weight_map": {"a": "s1"}})");
  EXPECT_EQ(read_tensor<float>(read_hf(local_storage(), snapshot), "a"), values_);
  std::filesystem::remove(snapshot + "/s1");
  std::filesystem::create_symlink("../../blobs/../secret", snapshot + "/s1");
  try {
    read_hf(local_storage(), snapshot);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("refused"));
  }
}

TEST_F(Hf, AllMissingShardsAreListed) {
  tensors("s1", {"a"});
  map(R"({"a":"s1","b":"s2","c":"s3"})");
  EXPECT_EQ(error().kind(), ErrorKind::kCorrupt);
  EXPECT_THAT(error().what(), HasSubstr("2 of 3 files are missing: s2, s3"));
}

TEST_F(Hf, ATensorInTwoFilesOrInNoneIsNamed) {
  tensors("s1", {"a"});
  tensors("s2", {"a", "b"});
  map(R"({"a":"s1","b":"s2"})");
  EXPECT_THAT(error().what(), HasSubstr("tensor 'a' is in two files, s1 and s2"));
  tensors("s2", {"b"});
  map(R"({"a":"s1","b":"s2","c":"s2"})");
  EXPECT_THAT(error().what(), HasSubstr("tensor 'c' should be in s2"));
}

TEST_F(Hf, DamagedTextsAreNamed) {
  tensors("model.safetensors", {"a"});
  put_file(folder_ / "config.json", "{");
  EXPECT_THAT(error().what(), HasSubstr("config.json"));
  EXPECT_EQ(error().kind(), ErrorKind::kCorrupt);
  put_file(folder_ / "config.json", "[]");
  EXPECT_EQ(error().kind(), ErrorKind::kCorrupt);
  std::filesystem::remove(folder_ / "config.json");
  EXPECT_EQ(error().kind(), ErrorKind::kNotFound);
  put_file(folder_ / "config.json", "{}");
  std::filesystem::remove(folder_ / "model.safetensors");
  put_file(folder_ / "model.safetensors.index.json", "{}");
  EXPECT_THAT(error().what(), HasSubstr("weight_map"));
}

}  // namespace
}  // namespace shardsmith
