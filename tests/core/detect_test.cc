// Recognised by content, never by name.
#include <gtest/gtest.h>

#include "format/dcp.h"
#include "format/detect.h"
#include "format/pt.h"
#include "format/safetensors.h"
#include "test_files.h"

namespace shardsmith {
namespace {

TEST(Detect, TellsByContent) {
  TestFolder folder;
  Storage& s = local_storage();
  PtContent content;
  content.value = Value(1);
  write_pt(s, folder / "a.safetensors", content);
  EXPECT_EQ(detect_format(s, folder / "a.safetensors"), "pt");
  write_safetensors(s, folder / "b.pt", {}, {});
  EXPECT_EQ(detect_format(s, folder / "b.pt"), "safetensors");
  put_file(folder / "c.pt", "hello world");
  EXPECT_EQ(detect_format(s, folder / "c.pt"), "");
  put_file(folder / "empty", "");
  EXPECT_EQ(detect_format(s, folder / "empty"), "");
  EXPECT_EQ(detect_format(s, folder.path()), "");
  EXPECT_EQ(thrown([&] { detect_format(s, folder / "none"); }).kind(), ErrorKind::kNotFound);

  s.make_directory(folder / "hf");
  put_file(folder / "hf/config.json", "{}");
  EXPECT_EQ(detect_format(s, folder / "hf"), "");
  write_safetensors(s, folder / "hf/model.safetensors", {}, {});
  EXPECT_EQ(detect_format(s, folder / "hf"), "hf");
  std::filesystem::create_directory_symlink(folder / "hf", folder / "link");
  EXPECT_EQ(detect_format(s, folder / "link"), "hf");
  put_file(folder / "hf/manifest.json", R"({"format_version":1})");
  EXPECT_EQ(detect_format(s, folder / "hf"), "partial");
  put_file(folder / "hf/manifest.json", R"({"some":"other tool"})");
  EXPECT_EQ(detect_format(s, folder / "hf"), "hf");
}

TEST(Detect, FoldersOfOtherTools) {
  TestFolder folder;
  Storage& s = local_storage();
  s.make_directory(folder / "dcp");
  PtContent content;
  content.value.set("step", Value(1));
  write_dcp(s, folder / "dcp", content);
  EXPECT_EQ(detect_format(s, folder / "dcp"), "dcp");
  s.remove_file(folder / "dcp/.metadata");
  EXPECT_EQ(detect_format(s, folder / "dcp"), "dcp");  // and reading it says that the save did not finish

  s.make_directory(folder / "st");
  put_file(folder / "st/model.safetensors.index.json", R"({"weight_map":{}})");
  EXPECT_EQ(detect_format(s, folder / "st"), "safetensors");
  put_file(folder / "st/.metadata", "another tool's");
  EXPECT_EQ(detect_format(s, folder / "st"), "safetensors");
  write_safetensors(s, folder / "st/shard-00001-model-00001-of-00001.safetensors", {}, {{"DCP_SHARDING_INFO", "{}"}});
  EXPECT_EQ(detect_format(s, folder / "st"), "dcp");
  put_file(folder / "st/config.json", "{}");
  EXPECT_EQ(detect_format(s, folder / "st"), "hf");
}

TEST(Detect, OtherPeoplesFoldersAreNothing) {
  TestFolder folder;
  Storage& s = local_storage();
  s.make_directory(folder / ".metadata");
  put_file(folder / "__init__.py", "");
  put_file(folder / "a.safetensors", "text");
  std::filesystem::create_symlink("nowhere", folder / "b.safetensors");
  EXPECT_EQ(detect_format(s, folder.path()), "");
  put_file(folder / "__x_0.distcp", "");
  EXPECT_EQ(detect_format(s, folder.path()), "");
}

TEST(Detect, AFileCutInHalfKeepsItsFormat) {
  TestFolder folder;
  const std::vector<float> f(100);
  write_safetensors(local_storage(), folder / "m",
                    {{"f", Dtype::kF32, {100}, {400, reinterpret_cast<const std::byte*>(f.data()), {}}}}, {});
  const std::string all = get_file(folder / "m");
  for (size_t n : {all.size() / 2, size_t{20}}) {
    put_file(folder / "m", all.substr(0, n));
    EXPECT_EQ(detect_format(local_storage(), folder / "m"), "safetensors");
    EXPECT_EQ(thrown([&] { read_safetensors(local_storage(), folder / "m"); }).kind(), ErrorKind::kCorrupt);
  }
}

}  // namespace
}  // namespace shardsmith
