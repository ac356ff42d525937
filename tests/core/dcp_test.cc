// torch.distributed.checkpoint: our writer against our reader, metadata of several ranks, damage. What torch itself
// writes and reads: tests/python/test_formats_dcp.py.
#include "format/dcp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "format/dcp_metadata.h"
#include "format/pickle.h"
#include "format/safetensors.h"
#include "storage/faulty_storage.h"
#include "test_files.h"

namespace shardsmith {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

template <typename T>
ByteSource source(const std::vector<T>& v) {
  return {v.size() * sizeof(T), reinterpret_cast<const std::byte*>(v.data()), {}};
}

PtTensor packed(size_t storage, Dtype dtype, Shape size) {
  PtTensor tensor;
  tensor.dtype = dtype;
  tensor.storage = storage;
  tensor.strides = contiguous_strides(size);
  tensor.size = std::move(size);
  return tensor;
}

// {"model": {"a": [3, 4] float32, "tied": the same, "t": a's transposed view, "scalar"}, "list": [tensor, 5],
//  "step": 7, "pair": (tensor, "x")}
struct Sample {
  std::vector<float> a = counted<float>(12);
  std::vector<int64_t> b = counted<int64_t>(20'000);
  std::vector<double> c = {3.5};
  PtContent content;

  Sample() {
    content.storages = {source(a), source(b), source(c)};
    PtTensor transposed = packed(0, Dtype::kF32, {4, 3});
    transposed.strides = {1, 4};
    PtTensor part = packed(1, Dtype::kI64, {3});
    part.offset = 7;
    part.strides = {5};
    content.tensors = {packed(0, Dtype::kF32, {3, 4}), packed(0, Dtype::kF32, {3, 4}),   transposed,
                       packed(2, Dtype::kF64, {}),     packed(1, Dtype::kI64, {20'000}), part};
    Value model;
    model.set("a", Value(TensorRef{0}));
    model.set("tied", Value(TensorRef{1}));
    model.set("t", Value(TensorRef{2}));
    model.set("scalar", Value(TensorRef{3}));
    content.value.set("model", std::move(model));
    content.value.set("list", Value(List{Value(TensorRef{4}), Value(5)}));
    content.value.set("plain", Value(List{Value(1), Value("two")}));
    content.value.set("step", Value(7));
    content.value.set("pair", Value(Tuple{{Value(TensorRef{5}), Value("x")}}));
  }
};

class Dcp : public ::testing::Test {
 protected:
  Dcp() { s.make_directory(out); }
  Error read_error() {
    return thrown([&] { read_dcp(s, out); });
  }

  TestFolder folder;
  Storage& s = local_storage();
  std::string out = folder / "out";
};

TEST_F(Dcp, WhatIsWrittenIsRead) {
  const Sample sample;
  write_dcp(s, out, sample.content);
  EXPECT_TRUE(is_dcp(s, out));
  EXPECT_EQ(s.list(out), (std::vector<std::string>{".metadata", "__0_0.distcp"}));
  const Index index = read_dcp(s, out);
  EXPECT_EQ(index.format, "dcp");
  EXPECT_EQ(read_tensor<float>(index, "model/a"), sample.a);
  EXPECT_EQ(read_tensor<float>(index, "model/t"), (std::vector<float>{1, 5, 9, 2, 6, 10, 3, 7, 11, 4, 8, 12}));
  EXPECT_EQ(read_tensor<double>(index, "model/scalar"), sample.c);
  EXPECT_EQ(read_tensor<int64_t>(index, "list/#0"), sample.b);
  EXPECT_EQ(read_tensor<int64_t>(index, "pair/#0"), (std::vector<int64_t>{8, 13, 18}));
  EXPECT_EQ(index.find("model/tied")->alias_of, "model/a");
  EXPECT_EQ(*index.values.find("step"), Value(7));
  EXPECT_EQ(*index.values.find("plain"), Value(List{Value(1), Value("two")}));
  EXPECT_EQ((*index.values.find("list")->get_if<List>())[1], Value(5));
  EXPECT_EQ(index.values.find("pair")->get_if<Tuple>()->items[1], Value("x"));
  const auto ref = [&](const Value* value) { return index.tensors[value->get_if<TensorRef>()->index].name; };
  EXPECT_EQ(ref(index.values.find("model")->find("t")), "model/t");
  EXPECT_EQ(ref(&index.values.find("pair")->get_if<Tuple>()->items[0]), "pair/#0");
}

TEST_F(Dcp, LargeItemsBeginAtPages) {
  const Sample sample;
  write_dcp(s, out, sample.content);
  const Index index = read_dcp(s, out);
  EXPECT_EQ(index.find("list/#0")->slices[0].offset % 4096, 0u);
  EXPECT_EQ(index.find("model/a")->slices[0].offset % 64, 0u);
}

TEST_F(Dcp, TheSameContentGivesTheSameBytes) {
  const Sample sample;
  write_dcp(s, out, sample.content);
  const std::string data = get_file(out + "/__0_0.distcp"), metadata = get_file(out + "/.metadata");
  s.make_directory(folder / "two");
  write_dcp(s, folder / "two", sample.content);
  EXPECT_EQ(get_file(folder / "two/__0_0.distcp"), data);
  EXPECT_EQ(get_file(folder / "two/.metadata"), metadata);
}

TEST_F(Dcp, SourcesAreReadOnceAndInOrder) {
  PtContent content;
  const std::vector<int32_t> values = counted<int32_t>(700'000);
  uint64_t next = 0;
  content.storages = {{values.size() * 4, nullptr, [&](uint64_t offset, std::span<std::byte> bytes) {
                         EXPECT_EQ(offset, next);
                         next = offset + bytes.size();
                         std::memcpy(bytes.data(), reinterpret_cast<const std::byte*>(values.data()) + offset,
                                     bytes.size());
                       }}};
  content.tensors = {packed(0, Dtype::kI32, {700, 1000}), packed(0, Dtype::kI32, {700, 1000})};
  content.value.set("w", Value(TensorRef{0}));
  content.value.set("tied", Value(TensorRef{1}));
  write_dcp(s, out, content);
  EXPECT_EQ(next, values.size() * 4);
  EXPECT_EQ(read_tensor<int32_t>(read_dcp(s, out), "w"), values);
}

TEST_F(Dcp, AStreamedStorageHasOneView) {
  PtContent content;
  content.storages = {{48, nullptr, [](uint64_t, std::span<std::byte>) {}}};
  PtTensor view = packed(0, Dtype::kF32, {4, 3});
  view.strides = {1, 4};
  content.tensors = {view};
  content.value.set("w", Value(TensorRef{0}));
  EXPECT_EQ(thrown([&] { write_dcp(s, out, content); }).kind(), ErrorKind::kInvalidArgument);
  content.tensors = {packed(0, Dtype::kF32, {12}), packed(0, Dtype::kF32, {3, 4})};
  content.value.set("v", Value(TensorRef{1}));
  EXPECT_THAT(thrown([&] { write_dcp(s, out, content); }).what(), HasSubstr("shares its bytes"));
  EXPECT_TRUE(s.list(out).empty());
}

TEST_F(Dcp, ASpecialTensorUnderTwoNamesIsOneItem) {
  PtContent content;
  size_t calls = 0;
  content.storages = {{6, nullptr, [&](uint64_t, std::span<std::byte> bytes) {
                         ++calls;
                         std::fill(bytes.begin(), bytes.end(), std::byte{7});
                       }}};
  content.tensors = {packed(0, Dtype::kQI8, {2, 3})};
  Value facts;
  facts.set("data", Value(TensorRef{0}));
  facts.set("qscheme", Value("torch.per_tensor_affine"));
  facts.set("scale", Value(0.5));
  facts.set("zero_point", Value(1));
  content.value.set("q", Value(Opaque{"torch.quantized", {facts}}));
  content.value.set("again", Value(Opaque{"torch.quantized", {facts}}));
  write_dcp(s, out, content);
  EXPECT_EQ(calls, 1u);
  const Index index = read_dcp(s, out);
  EXPECT_EQ(read_tensor<int8_t>(index, "q"), std::vector<int8_t>(6, 7));
  EXPECT_EQ(read_tensor<int8_t>(index, "again"), std::vector<int8_t>(6, 7));
}

TEST_F(Dcp, StridesAreGatheredAcrossBlocks) {
  // 3 MiB of a transposed view: blocks end inside of rows.
  PtContent content;
  const std::vector<int64_t> values = counted<int64_t>(393'216);
  content.storages = {source(values)};
  PtTensor view = packed(0, Dtype::kI64, {512, 768});
  view.strides = {1, 512};
  content.tensors = {view};
  content.value.set("w", Value(TensorRef{0}));
  write_dcp(s, out, content);
  const auto back = read_tensor<int64_t>(read_dcp(s, out), "w");
  for (size_t i = 0; i < 512; ++i)
    for (size_t k = 0; k < 768; ++k) ASSERT_EQ(back[i * 768 + k], values[k * 512 + i]);
}

TEST_F(Dcp, FlatKeysMustDiffer) {
  PtContent content;
  Value inner;
  inner.set("b", Value(1));
  content.value.set("a", std::move(inner));
  content.value.set("a.b", Value(2));
  const Error e = thrown([&] { write_dcp(s, out, content); });
  EXPECT_EQ(e.kind(), ErrorKind::kUnsupported);
  EXPECT_THAT(e.what(), HasSubstr("'a.b'"));
}

TEST_F(Dcp, OnlyAnEmptyFolderIsWrittenInto) {
  put_file(out + "/other", "x");
  EXPECT_THAT(thrown([&] { write_dcp(s, out, Sample().content); }).what(), HasSubstr("not empty"));
  EXPECT_EQ(thrown([&] { write_dcp(s, folder / "none", Sample().content); }).kind(), ErrorKind::kInvalidArgument);
  PtContent list;
  list.value = Value(List{});
  s.make_directory(folder / "two");
  EXPECT_THAT(thrown([&] { write_dcp(s, folder / "two", list); }).what(), HasSubstr("holds a dict"));
}

TEST_F(Dcp, MissingAndTruncatedFilesAreListed) {
  write_dcp(s, out, Sample().content);
  const std::string data = get_file(out + "/__0_0.distcp");
  put_file(out + "/__0_0.distcp", data.substr(0, data.size() - 10));
  EXPECT_THAT(read_error().what(), AllOf(HasSubstr("truncated"), HasSubstr("__0_0.distcp")));
  s.remove_file(out + "/__0_0.distcp");
  EXPECT_EQ(read_error().kind(), ErrorKind::kCorrupt);
  EXPECT_THAT(read_error().what(), AllOf(HasSubstr("1 of 1"), HasSubstr("missing"), HasSubstr("__0_0.distcp")));
}

TEST_F(Dcp, ASaveThatDidNotFinishIsSaid) {
  write_dcp(s, out, Sample().content);
  s.remove_file(out + "/.metadata");
  EXPECT_TRUE(is_dcp(s, out));
  EXPECT_EQ(read_error().kind(), ErrorKind::kCorrupt);
  EXPECT_THAT(read_error().what(), HasSubstr("did not finish"));
}

// What torch would write on two ranks: rows 0-2 of w on one, 3-4 on the other.
struct TwoRanks {
  explicit TwoRanks(const std::string& out) : out(out) {
    for (size_t rank = 0; rank < 2; ++rank) {
      const std::vector<float> part(rows.begin() + (rank ? 9 : 0), rank ? rows.end() : rows.begin() + 9);
      const int64_t count = rank ? 2 : 3;
      PtContent item;
      item.storages = {source(part)};
      item.tensors = {packed(0, Dtype::kF32, {count, 3})};
      item.value = Value(TensorRef{0});
      item.with_slices = false;
      const std::string name = "__" + std::to_string(rank) + "_0.distcp";
      const uint64_t size = write_pt(local_storage(), out + "/" + name, item).size;
      chunks.push_back({{{rank ? 3 : 0, 0}, {count, 3}}, {name, 0, size}});
    }
  }
  DcpEntry entry(std::vector<DcpChunk> held) const {
    DcpEntry entry;
    entry.key = "model.w";
    entry.path = {Value("model"), Value("w")};
    entry.is_tensor = true;
    entry.shape = {5, 3};
    entry.chunks = std::move(held);
    return entry;
  }
  void metadata(const std::string& name, const std::vector<DcpEntry>& entries) const {
    put_file(out + "/" + name, make_dcp_metadata(entries));
  }

  std::string out;
  std::vector<float> rows = counted<float>(15);
  std::vector<DcpChunk> chunks;
};

TEST_F(Dcp, ChunksOfSeveralRanksAreOneTensor) {
  const TwoRanks ranks(out);
  ranks.metadata(".metadata", {ranks.entry(ranks.chunks)});
  const Index index = read_dcp(s, out);
  EXPECT_EQ(index.find("model/w")->slices.size(), 2u);
  EXPECT_EQ(read_tensor<float>(index, "model/w"), ranks.rows);
}

TEST_F(Dcp, RanksWithoutElementsAddNothing) {
  // Five rows over more ranks than there are rows: the last ones' chunks are empty, at one and the same place.
  const TwoRanks ranks(out);
  auto chunks = ranks.chunks;
  chunks.push_back({{{5, 0}, {0, 3}}, {}});
  chunks.push_back({{{5, 0}, {0, 3}}, ranks.chunks[0].item});
  chunks.push_back({{{5, 0}, {0, 3}}, ranks.chunks[0].item});
  ranks.metadata(".metadata", {ranks.entry(chunks)});
  const Index index = read_dcp(s, out);
  EXPECT_EQ(index.find("model/w")->slices.size(), 2u);
  EXPECT_EQ(read_tensor<float>(index, "model/w"), ranks.rows);
}

TEST_F(Dcp, NothingIsLegal) {
  write_dcp(s, out, PtContent{Value(Dict{}), {}, {}, {}, true});
  EXPECT_EQ(read_dcp(s, out).values, Value(Dict{}));
  const std::vector<float> none;
  PtContent content;
  content.storages = {source(none)};
  content.tensors = {packed(0, Dtype::kF32, {0, 4}), packed(0, Dtype::kF32, {3, 0})};
  content.value.set("a", Value(TensorRef{0}));
  content.value.set("b", Value(TensorRef{1}));
  s.make_directory(folder / "two");
  write_dcp(s, folder / "two", content);
  const Index index = read_dcp(s, folder / "two");
  EXPECT_EQ(index.find("a")->shape, (Shape{0, 4}));
  EXPECT_EQ(index.find("b")->alias_of, "");
}

TEST_F(Dcp, MetadataOfEachRankAreJoined) {
  const TwoRanks ranks(out);
  ranks.metadata("__0.metadata", {ranks.entry({ranks.chunks[0]})});
  ranks.metadata("__1.metadata", {ranks.entry({ranks.chunks[1]})});
  EXPECT_TRUE(is_dcp(s, out));
  EXPECT_EQ(read_tensor<float>(read_dcp(s, out), "model/w"), ranks.rows);
  s.remove_file(out + "/__0.metadata");
  EXPECT_THAT(read_error().what(), HasSubstr("__0.metadata"));
  ranks.metadata("__0.metadata", {ranks.entry({ranks.chunks[0]})});
  s.remove_file(out + "/__1.metadata");
  EXPECT_THAT(read_error().what(), HasSubstr("__1.metadata"));  // its data file tells that there is a rank 1
}

TEST_F(Dcp, HolesAndOverlapsAreRefused) {
  const TwoRanks ranks(out);
  ranks.metadata(".metadata", {ranks.entry({ranks.chunks[0]})});
  EXPECT_THAT(read_error().what(), AllOf(HasSubstr("'model/w'"), HasSubstr("9 of its 15")));
  auto moved = ranks.chunks;
  moved[1].box.offset[0] = 2;
  ranks.metadata(".metadata", {ranks.entry(moved)});
  EXPECT_THAT(read_error().what(), HasSubstr("overlaps"));
  moved[1].box.offset[0] = 4;
  ranks.metadata(".metadata", {ranks.entry(moved)});
  EXPECT_THAT(read_error().what(), HasSubstr("does not lie inside"));
}

TEST_F(Dcp, WhatTheItemHoldsMustAgree) {
  const TwoRanks ranks(out);
  DcpEntry entry = ranks.entry(ranks.chunks);
  entry.dtype = Dtype::kI32;
  ranks.metadata(".metadata", {entry});
  EXPECT_THAT(read_error().what(), HasSubstr("is float32 instead of int32"));
  entry = ranks.entry(ranks.chunks);
  std::swap(entry.chunks[0].item, entry.chunks[1].item);
  ranks.metadata(".metadata", {entry});
  EXPECT_THAT(read_error().what(), HasSubstr("[2, 3] instead of [3, 3]"));
}

TEST_F(Dcp, FilesOutsideOfTheFolderAreRefused) {
  const TwoRanks ranks(out);
  put_file(folder / "outside", get_file(out + "/__0_0.distcp"));
  std::filesystem::create_symlink(folder / "outside", out + "/link");
  for (const std::string name : {"../outside", "/etc/passwd", "..", "link", "a/b", ""}) {
    auto chunks = ranks.chunks;
    chunks[0].item.file = name;
    ranks.metadata(".metadata", {ranks.entry(chunks)});
    EXPECT_EQ(read_error().kind(), ErrorKind::kCorrupt) << name;
    EXPECT_THAT(read_error().what(), name.empty() ? HasSubstr("in no data file") : HasSubstr("refused")) << name;
  }
}

TEST_F(Dcp, PlacesBeyondTheFileAreRefused) {
  const TwoRanks ranks(out);
  for (const DcpItem& item : {DcpItem{"__0_0.distcp", UINT64_MAX / 2, 10}, DcpItem{"__0_0.distcp", 0, INT64_MAX},
                              DcpItem{"__0_0.distcp", INT64_MAX, INT64_MAX}, DcpItem{"__0_0.distcp", 5, 3}}) {
    auto chunks = ranks.chunks;
    chunks[0].item = item;
    ranks.metadata(".metadata", {ranks.entry(chunks)});
    EXPECT_EQ(read_error().kind(), ErrorKind::kCorrupt) << item.offset;
  }
}

TEST_F(Dcp, PathsThatContradictEachOtherAreRefused) {
  const TwoRanks ranks(out);
  const auto with_path = [&](const char* key, List path) {
    DcpEntry entry = ranks.entry(ranks.chunks);
    entry.key = key;
    entry.path = std::move(path);
    return entry;
  };
  const List a{Value("a")}, ab{Value("a"), Value("b")}, a0{Value("a"), Value(0)}, far{Value("a"), Value(1 << 30)};
  const std::vector<std::vector<DcpEntry>> cases = {{with_path("x", a), with_path("y", ab)},
                                                    {with_path("x", ab), with_path("y", a)},
                                                    {with_path("x", ab), with_path("y", a0)},
                                                    {with_path("x", ab), with_path("y", ab)},
                                                    {with_path("x", far)},
                                                    {with_path("x", {Value(3)})}};
  for (size_t i = 0; i < cases.size(); ++i) {
    ranks.metadata(".metadata", cases[i]);
    EXPECT_EQ(read_error().kind(), ErrorKind::kCorrupt) << i;
  }
}

TEST_F(Dcp, EveryPrefixAndFlippedByteOfTheMetadataEndsInTime) {
  const TwoRanks ranks(out);
  const std::string good = make_dcp_metadata({ranks.entry(ranks.chunks)});
  for (size_t n = 0; n < good.size(); ++n)
    EXPECT_EQ(thrown([&] { parse_dcp_metadata(good.substr(0, n), "m"); }).kind(), ErrorKind::kCorrupt) << n;
  for (size_t at = 0; at < good.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
      try {
        parse_dcp_metadata(bad, "m");
      } catch (const Error&) {  // either is right; a crash or another exception is not
      }
    }
  }
}

TEST_F(Dcp, ReadErrorsAndFullDisksAreErrors) {
  const Sample sample;
  int64_t calls = 0;
  {
    FaultyStorage counting(s);
    write_dcp(counting, out, sample.content);
    calls = counting.calls();
  }
  for (int64_t at = 0; at < calls; ++at) {
    for (const Fault::Kind kind : {Fault::Kind::kIoError, Fault::Kind::kNoSpace}) {
      remove_tree(s, out);
      s.make_directory(out);
      FaultyStorage faulty(s, {kind, at});
      const Error e = thrown([&] { write_dcp(faulty, out, sample.content); });
      // A full disk does not hinder a rename; every other failure is told.
      EXPECT_TRUE(e.kind() == ErrorKind::kIo || (kind == Fault::Kind::kNoSpace && e.kind() == ErrorKind::kInterrupted));
      // The commit marker comes last: it is there, at most, when all else is.
      if (s.stat(out + "/.metadata").exists) {
        EXPECT_NO_THROW(read_dcp(s, out)) << at;
      } else {
        EXPECT_EQ(e.kind(), ErrorKind::kIo) << at;
      }
    }
  }
}

std::string sharding(const std::string& name, const std::string& offsets) {
  return "{\"" + name + "\":{\"saved_offsets\":" + offsets + "}}";
}

TEST_F(Dcp, TheHuggingFaceVariantIsRead) {
  const std::vector<float> rows = counted<float>(15);
  const auto piece = [&](const char* file, size_t from, size_t to, const std::string& offsets) {
    const std::vector<float> part(rows.begin() + static_cast<long>(3 * from), rows.begin() + static_cast<long>(3 * to));
    write_safetensors(s, out + "/" + file, {{"w", Dtype::kF32, {static_cast<int64_t>(to - from), 3}, source(part)}},
                      {{"DCP_SHARDING_INFO", sharding("w", offsets)}, {"DCP_VERSION", "1.0"}, {"format", "pt"}});
  };
  piece("shard-00001-model-00001-of-00001.safetensors", 0, 3, "[0,0]");
  piece("shard-00002-model-00001-of-00001.safetensors", 3, 5, "[3,0]");
  EXPECT_TRUE(is_dcp(s, out));
  const Index index = read_dcp(s, out);
  EXPECT_EQ(index.format, "dcp");
  EXPECT_EQ(read_tensor<float>(index, "w"), rows);
  EXPECT_EQ(index.tensors[index.values.find("w")->get_if<TensorRef>()->index].name, "w");

  s.remove_file(out + "/shard-00001-model-00001-of-00001.safetensors");
  EXPECT_THAT(read_error().what(), HasSubstr("shard 1"));
  piece("shard-00001-model-00001-of-00001.safetensors", 0, 3, "[0]");
  EXPECT_THAT(read_error().what(), HasSubstr("saved_offsets"));
  piece("shard-00001-model-00001-of-00001.safetensors", 0, 3, "[1,0]");
  EXPECT_THAT(read_error().what(), HasSubstr("overlaps"));
  piece("shard-00001-model-00001-of-00001.safetensors", 0, 3, "[9223372036854775807,0]");
  EXPECT_EQ(read_error().kind(), ErrorKind::kCorrupt);
  piece("shard-00001-model-00001-of-00002.safetensors", 0, 3, "[0,0]");
  EXPECT_THAT(read_error().what(), HasSubstr("model-00002"));
}

}  // namespace
}  // namespace shardsmith
