// safetensors: what is written is read; a zoo of hostile headers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "format/bytes.h"
#include "format/safetensors.h"
#include "storage/faulty_storage.h"
#include "test_files.h"

namespace shardsmith {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string file_of(const std::string& header, const std::string& data) {
  std::string out;
  put_le<uint64_t>(out, header.size());
  return out + header + data;
}

ByteSource source_of(const auto& v) {
  return {v.size() * sizeof(v[0]), reinterpret_cast<const std::byte*>(v.data()), {}};
}

TEST(Safetensors, WrittenInTheReferencesOrderAndRead) {
  TestFolder folder;
  const auto f = counted<float>(6);
  const auto h = counted<uint16_t>(3);
  const std::vector<uint8_t> none;
  write_safetensors(local_storage(), folder / "m.safetensors",
                    {{"h", Dtype::kBF16, {3}, source_of(h)},
                     {"z", Dtype::kF32, {2, 3}, source_of(f)},
                     {"a", Dtype::kF32, {2, 3}, source_of(f)},
                     {"none", Dtype::kU8, {0, 7}, source_of(none)}},
                    {{"format", "pt"}});
  const std::string bytes = get_file(folder / "m.safetensors");
  EXPECT_EQ(
      bytes.substr(8, bytes.find("}}") - 6),
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("z":{"dtype":"F32","shape":[2,3],"data_offsets":[24,48]},"h":{"dtype":"BF16","shape":[3],"data_offsets":[48,54]},)"
      R"("none":{"dtype":"U8","shape":[0,7],"data_offsets":[54,54]}})");
  EXPECT_EQ(get_le<uint64_t>(bytes, 0) % 8, 0u);
  const Index index = read_safetensors(local_storage(), folder / "m.safetensors");
  validate(index);
  EXPECT_EQ(read_tensor<float>(index, "z"), f);
  EXPECT_EQ(read_tensor<uint16_t>(index, "h"), h);
  EXPECT_EQ(*index.values.find("format"), Value("pt"));
  EXPECT_THAT(local_storage().list(folder.path()), ElementsAre("m.safetensors"));
}

TEST(Safetensors, NoTensorsAndScalarsAreLegal) {
  TestFolder folder;
  write_safetensors(local_storage(), folder / "m", {}, {{"a", "\"\x7f\n"}});
  EXPECT_EQ(*read_safetensors(local_storage(), folder / "m").values.find("a"), Value("\"\x7f\n"));
  const auto one = counted<double>(1);
  write_safetensors(local_storage(), folder / "m", {{"s", Dtype::kF64, {}, source_of(one)}}, {});
  EXPECT_EQ(read_tensor<double>(read_safetensors(local_storage(), folder / "m"), "s"), one);
}

TEST(Safetensors, HostileHeadersAreRefused) {
  const std::string good =
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[1],"data_offsets":[8,9]}})";
  TestFolder folder;
  const auto error = [&](const std::string& bytes) {
    put_file(folder / "m", bytes);
    return thrown([&] { read_safetensors(local_storage(), folder / "m"); });
  };
  const std::string data(9, 'x');
  EXPECT_EQ(error(file_of(good, data)).kind(), ErrorKind::kInterrupted);
  EXPECT_EQ(error(file_of(good + "   ", data)).kind(), ErrorKind::kInterrupted);
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string header = good;
    header.replace(header.find(from), from.size(), to);
    return file_of(header, data);
  };
  for (const auto& [bytes, text] : std::vector<std::pair<std::string, std::string>>{
           {file_of(good, data + "x"), "10 bytes of data"},
           {file_of(good, "x"), "truncated"},
           {changed("[8,9]", "[7,8]"), "overlaps"},
           {changed("[8,9]", "[9,10]"), "truncated"},
           {changed("[0,8]", "[0,4]"), "needs 8 bytes"},
           {changed("[0,8]", "[8,0]"), "needs 8 bytes"},
           {changed("[0,8]", "[0]"), "1 numbers"},
           {changed("[0,8]", "[-1,8]"), "sizes"},
           {changed("[0,8]", "[0,18446744073709551615]"), "sizes"},
           {changed("[2]", "[2.0]"), "sizes"},
           {changed("[2]", "[4611686018427387904,4]"), "needs"},
           {changed("\"b\"", "\"a\""), "stands twice"},
           {changed("F32", "F33"), "F33"},
           {changed("\"b\"", "\"__metadata__\""), "__metadata__"},
           {changed("{\"a\"", "[\"a\""), "'{'"},
           {file_of("{}x", ""), "JSON"},
           {file_of(R"({"__metadata__":{"a":1}})", ""), "'a' is no text"},
           {file_of("", ""), "'{'"},
           {std::string("\xff\xff\xff\xff\xff\xff\xff\x7f{}", 10), "header of"},
           {std::string("\x00\xff\0\0\0\0\0\0{}", 10), "truncated"}}) {
    const Error e = error(bytes);
    EXPECT_NE(e.kind(), ErrorKind::kInterrupted) << text;
    EXPECT_THAT(e.what(), HasSubstr(text));
  }
  // A hole: the second tensor begins one byte late.
  EXPECT_THAT(
      error(
          file_of(
              R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
              "xxx"))
          .what(),
      HasSubstr("hole"));
}

TEST(Safetensors, EveryPrefixIsRefusedAndEveryFlippedByteHandled) {
  TestFolder folder;
  const std::string all = file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678");
  for (size_t n = 0; n < all.size(); ++n) {
    put_file(folder / "m", all.substr(0, n));
    EXPECT_EQ(thrown([&] { read_safetensors(local_storage(), folder / "m"); }).kind(), ErrorKind::kCorrupt) << n;
  }
  for (size_t at = 0; at < all.size(); ++at)
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = all;
      bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
      put_file(folder / "m", bad);
      try {
        validate(read_safetensors(local_storage(), folder / "m"));
      } catch (const Error&) {
      }
    }
}

TEST(Safetensors, AppearsWholeOrNotAtAll) {
  TestFolder folder;
  put_file(folder / "m", "old");
  const auto f = counted<float>(100);
  FaultyStorage counting(local_storage());
  write_safetensors(counting, folder / "m", {{"f", Dtype::kF32, {100}, source_of(f)}}, {});
  const std::string whole_file = get_file(folder / "m");
  for (int64_t at = 0; at + 1 < counting.calls(); ++at) {
    put_file(folder / "m", "old");
    FaultyStorage faulty(local_storage(), {Fault::Kind::kIoError, at});
    EXPECT_EQ(thrown([&] {
                write_safetensors(faulty, folder / "m", {{"f", Dtype::kF32, {100}, source_of(f)}}, {});
              }).kind(),
              ErrorKind::kIo);
    EXPECT_EQ(get_file(folder / "m"), "old") << at;
    EXPECT_THAT(local_storage().list(folder.path()), ElementsAre("m"));
  }
}

TEST(Safetensors, WhatItHasNoWordForIsNamed) {
  TestFolder folder;
  const auto c = counted<double>(2);
  const Error e = thrown([&] {
    write_safetensors(local_storage(), folder / "m", {{"w", Dtype::kC128, {1}, source_of(c)}}, {});
  });
  EXPECT_EQ(e.kind(), ErrorKind::kUnsupported);
  EXPECT_THAT(e.what(), HasSubstr("'w'"));
  EXPECT_EQ(thrown([&] {
              write_safetensors(local_storage(), folder / "m", {{"w", Dtype::kF64, {3}, source_of(c)}}, {});
            }).kind(),
            ErrorKind::kInvalidArgument);
}

TEST(Safetensors, TiesInTheMetadataAreAliases) {
  TestFolder folder;
  const auto f = counted<float>(6);
  write_safetensors(local_storage(), folder / "m",
                    {{"kept", Dtype::kF32, {2, 3}, source_of(f)}, {"x", Dtype::kF32, {6}, source_of(f)}},
                    {{"format", "kept"}, {"other", "kept"}, {"x", "kept"}, {"note", "nothing"}, {"again", "other"}});
  const Index index = read_safetensors(local_storage(), folder / "m");
  validate(index);
  ASSERT_NE(index.find("other"), nullptr);
  EXPECT_EQ(index.find("other")->alias_of, "kept");
  EXPECT_EQ(index.find("other")->shape, (Shape{2, 3}));
  EXPECT_EQ(read_tensor<float>(index, "other"), f);
  EXPECT_EQ(index.tensors.size(),
            3u);  // "x" is a tensor itself, "format" never a tie, "nothing" and "other" no tensors
}

TEST(Safetensors, DtypesOfFourAndSixBitsAreNamed) {
  TestFolder folder;
  for (const std::string dtype : {"F4", "F6_E2M3", "F6_E3M2"}) {
    put_file(folder / "m",
             file_of(R"({"small":{"dtype":")" + dtype + R"(","shape":[8],"data_offsets":[0,4]}})", "1234"));
    const Error e = thrown([&] { read_safetensors(local_storage(), folder / "m"); });
    EXPECT_EQ(e.kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("'small'"), HasSubstr(dtype)));
  }
}

TEST(Safetensors, AFolderWithAnIndexIsOneCheckpoint) {
  TestFolder folder;
  const auto f = counted<float>(6);
  Storage& s = local_storage();
  write_safetensors(s, folder / "a.safetensors", {{"x", Dtype::kF32, {6}, source_of(f)}},
                    {{"format", "pt"}, {"tied", "x"}, {"y", "x"}});
  write_safetensors(s, folder / "b.safetensors", {{"y", Dtype::kF32, {2, 3}, source_of(f)}}, {{"format", "pt"}});
  EXPECT_FALSE(is_safetensors_folder(s, folder.path()));
  put_file(folder / "w.safetensors.index.json", R"({"weight_map":{"x":"a.safetensors","y":"b.safetensors"}})");
  EXPECT_TRUE(is_safetensors_folder(s, folder.path()));
  const Index index = read_safetensors_folder(s, folder.path());
  validate(index);
  EXPECT_EQ(index.format, "safetensors");
  EXPECT_EQ(read_tensor<float>(index, "y"), f);
  EXPECT_EQ(index.find("y")->shape, (Shape{2, 3}));  // what is stored wins over a tie
  EXPECT_EQ(index.find("tied")->alias_of, "x");
  EXPECT_EQ(*index.values.find("format"), Value("pt"));

  put_file(folder / "v.safetensors.index.json", "{}");
  EXPECT_EQ(thrown([&] { read_safetensors_folder(s, folder.path()); }).kind(), ErrorKind::kInvalidArgument);
  // The well-known name wins.
  put_file(folder / "model.safetensors.index.json", R"({"weight_map":{"x":"../a.safetensors"}})");
  EXPECT_THAT(thrown([&] { read_safetensors_folder(s, folder.path()); }).what(), HasSubstr("refused"));
}

}  // namespace
}  // namespace shardsmith
