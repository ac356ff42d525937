// .pt files: our writer against our reader; the slice list; damage.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <cstring>

#include "base/checksum.h"
#include "format/pickle.h"
#include "format/pt.h"
#include "format/zip.h"
#include "storage/faulty_storage.h"
#include "test_files.h"

namespace shardsmith {
namespace {

using ::testing::HasSubstr;

struct Sample {
  std::vector<float> a = counted<float>(12);
  std::vector<uint16_t> b = counted<uint16_t>(50'000);
  std::vector<int64_t> c = counted<int64_t>(500'000);
  PtContent content;

  Sample() {
    const auto source = [](const auto& v) {
      return ByteSource{v.size() * sizeof(v[0]), reinterpret_cast<const std::byte*>(v.data()), {}};
    };
    content.storages = {source(a), source(b), source(c), {}};
    content.tensors = {
        {Dtype::kF32, 0, 0, {3, 4}, {4, 1}, true, "model/a", {6, 4}, {{3, 0}, {3, 4}}},
        {Dtype::kF32, 0, 0, {4, 3}, {1, 4}, false, "", {}, {}},  // a transposed view
        {Dtype::kBF16, 1, 0, {50, 1000}, {1000, 1}, false, "model/b", {40, 3000}, {{0, 1000}, {40, 1000}}},  // padded
        {Dtype::kI64, 2, 0, {500'000}, {1}, false, "model/c", {500'000}, {{0}, {500'000}}},
        {Dtype::kF32, 3, 0, {0, 5}, {5, 1}, false, "", {}, {}},
        {Dtype::kI64, 2, 0, {500'000}, {1}, false, "", {}, {}},  // tied to c
    };
    Value model;
    model.set("a", Value(TensorRef{0}));
    model.set("a.t", Value(TensorRef{1}));
    model.set("b", Value(TensorRef{2}));
    model.set("c", Value(TensorRef{3}));
    model.set("head", Value(TensorRef{5}));
    model.set("none", Value(TensorRef{4}));
    content.value.set("model", std::move(model));
    content.value.set("step", Value(7));
    content.value.set("path", Value(Opaque{"pathlib.PosixPath", {Value("x")}}));
    content.extra.set("save_id", Value("abc"));
  }
};

TEST(Pt, WhatIsWrittenIsRead) {
  TestFolder folder;
  const Sample sample;
  const Written written = write_pt(local_storage(), folder / "m.pt", sample.content);
  EXPECT_EQ(written.size, get_file(folder / "m.pt").size());
  const Index index = read_pt(local_storage(), folder / "m.pt");
  validate(index, false);
  ASSERT_EQ(index.tensors.size(), 6u);
  const TensorEntry* a = index.find("model/a");
  ASSERT_TRUE(a);
  EXPECT_EQ(a->shape, (Shape{6, 4}));
  EXPECT_EQ(a->slices[0].box, (Box{{3, 0}, {3, 4}}));
  const TensorEntry* b = index.find("model/b");
  EXPECT_EQ(b->slices[0].box, (Box{{0, 1000}, {40, 1000}}));
  EXPECT_EQ(b->slices[0].strides, (Strides{1000, 1}));
  EXPECT_EQ(index.find("model/head")->alias_of, "model/c");
  EXPECT_EQ(index.find("model/none")->alias_of, "");
  EXPECT_EQ(*index.values.find("step"), Value(7));
  EXPECT_EQ(*index.values.find("path"), *sample.content.value.find("path"));
  EXPECT_EQ(read_tensor<int64_t>(index, "model/c"), sample.c);
  EXPECT_EQ(read_tensor<int64_t>(index, "model/head"), sample.c);
  const std::vector<float> t = read_tensor<float>(index, "model/a.t");
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 3; ++j) EXPECT_EQ(t[i * 3 + j], sample.a[j * 4 + i]);
}

TEST(Pt, TheRecordHasDigestExtraAndTheBlocksOfTheFile) {
  TestFolder folder;
  const Sample sample;
  const Written written = write_pt(local_storage(), folder / "m.pt", sample.content);
  const PtRecord record = read_pt_record(local_storage(), folder / "m.pt");
  ASSERT_TRUE(record.present);
  EXPECT_EQ(record.digest, written.digest);
  EXPECT_EQ(record.extra, sample.content.extra);
  EXPECT_EQ(record.file_size, written.size);
  const std::string bytes = get_file(folder / "m.pt");
  const BlockChecksums& sums = *record.checksums;
  ASSERT_GT(sums.crc.size(), 3u);
  for (size_t i = 0; i < sums.crc.size(); ++i) {
    const size_t begin = i << 20, end = std::min<size_t>((i + 1) << 20, sums.covered);
    EXPECT_EQ(crc32(std::as_bytes(std::span(bytes)).subspan(begin, end - begin)), sums.crc[i]) << i;
  }
}

TEST(Pt, LargeRecordsAreAlignedAndEveryCrcIsRight) {
  TestFolder folder;
  write_pt(local_storage(), folder / "m.pt", Sample().content);
  const auto file = local_storage().open_read(folder / "m.pt");
  for (const ZipRecord& r : read_zip(*file)) {
    EXPECT_EQ(r.data % (r.size >= 65536 ? 4096 : 64), 0u) << r.name;
    if (r.size) {
      EXPECT_NE(r.crc, 0u);
    }
    EXPECT_NO_THROW(read_record(*file, r, 1 << 30)) << r.name;  // checks the CRC
    EXPECT_NE(r.name, "archive/.format_version");
  }
}

TEST(Pt, TheSameContentGivesTheSameBytesFromMemoryOrFilledIn) {
  TestFolder folder;
  Sample sample;
  write_pt(local_storage(), folder / "1.pt", sample.content);
  for (ByteSource& source : sample.content.storages) {
    const std::byte* data = source.data;
    auto next = std::make_shared<uint64_t>(0);
    source.fill = [data, next](uint64_t offset, std::span<std::byte> out) {
      EXPECT_EQ(offset, *next) << "ranges adjoin";
      *next += out.size();
      std::memcpy(out.data(), data + offset, out.size());
    };
    source.data = nullptr;
  }
  write_pt(local_storage(), folder / "2.pt", sample.content);
  EXPECT_EQ(get_file(folder / "1.pt"), get_file(folder / "2.pt"));
}

TEST(Pt, AFileOfManyBuffersComesBack) {
  TestFolder folder;
  const auto values = counted<uint32_t>(8 << 20);  // 32 MiB: more than both buffers
  PtContent content;
  content.storages = {{values.size() * 4, reinterpret_cast<const std::byte*>(values.data()), {}}};
  content.tensors = {{Dtype::kI32, 0, 0, {8 << 20}, {1}, false, "x", {8 << 20}, {{0}, {8 << 20}}}};
  content.value.set("x", Value(TensorRef{0}));
  write_pt(local_storage(), folder / "m.pt", content);
  EXPECT_EQ(read_tensor<uint32_t>(read_pt(local_storage(), folder / "m.pt"), "x"), values);
}

PtContent small() {
  static const std::vector<float> values = counted<float>(6);
  PtContent content;
  content.storages = {{24, reinterpret_cast<const std::byte*>(values.data()), {}}};
  content.tensors = {{Dtype::kF32, 0, 0, {2, 3}, {3, 1}, false, "w", {2, 3}, {{0, 0}, {2, 3}}}};
  content.value.set("w", Value(TensorRef{0}));
  return content;
}

TEST(Pt, EveryPrefixIsRefused) {
  TestFolder folder;
  write_pt(local_storage(), folder / "m.pt", small());
  const std::string all = get_file(folder / "m.pt");
  for (size_t n = 0; n < all.size(); ++n) {
    put_file(folder / "cut.pt", std::string_view(all).substr(0, n));
    const Error e = thrown([&] { read_pt(local_storage(), folder / "cut.pt"); });
    EXPECT_EQ(e.kind(), ErrorKind::kCorrupt) << n << " " << e.what();
    EXPECT_THAT(e.what(), HasSubstr("cut.pt"));
  }
}

TEST(Pt, NoFlippedBitChangesATensorInSilence) {
  TestFolder folder;
  write_pt(local_storage(), folder / "m.pt", small());
  const std::string all = get_file(folder / "m.pt");
  const std::vector<float> good = counted<float>(6);
  for (size_t at = 0; at < all.size(); ++at) {
    for (int bit : {0, 5}) {
      std::string bad = all;
      bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
      put_file(folder / "bad.pt", bad);
      try {
        const Index index = read_pt(local_storage(), folder / "bad.pt");
        validate(index, false);
        // Where the reader lets it pass, name and values are still right.
        EXPECT_EQ(read_tensor<float>(index, "w"), good) << at;
      } catch (const Error& e) {
        EXPECT_THAT(e.what(), ::testing::Not(HasSubstr("nothing was thrown")));
      }
    }
  }
}

// A zip with the given records, CRCs right.
void write_zip(const std::string& path, const std::vector<std::pair<std::string, std::string>>& records) {
  ZipLayout layout;
  std::string out;
  std::vector<uint32_t> crcs;
  for (const auto& [name, data] : records) layout.add(name, data.size(), 64);
  for (size_t i = 0; i < records.size(); ++i) {
    crcs.push_back(crc32(std::as_bytes(std::span(records[i].second))));
    out += layout.local_header(i) + records[i].second + layout.descriptor(i, crcs[i]);
  }
  put_file(path, out + layout.directory(crcs));
}

std::string one_tensor_pickle(uint64_t bytes = 24) {
  const std::vector<PickledTensor> tensors{{0, Dtype::kF32, 0, {2, 3}, {3, 1}, false}};
  const std::vector<PickledStorage> storages{{"0", bytes}};
  Value value;
  value.set("w", Value(TensorRef{0}));
  return write_pickle(value, tensors, storages, "w");
}

TEST(Pt, MissingShortAndForeignRecordsAreNamed) {
  TestFolder folder;
  const std::string path = folder / "m.pt";
  const auto error = [&](const std::vector<std::pair<std::string, std::string>>& records) {
    write_zip(path, records);
    return thrown([&] { read_pt(local_storage(), path); });
  };
  EXPECT_EQ(error({{"a/data.pkl", one_tensor_pickle()}, {"a/data/0", std::string(24, 'x')}}).kind(),
            ErrorKind::kInterrupted);
  EXPECT_THAT(error({{"a/data.pkl", one_tensor_pickle()}}).what(), HasSubstr("'data/0' is missing"));
  EXPECT_THAT(error({{"a/data.pkl", one_tensor_pickle()}, {"a/data/0", std::string(23, 'x')}}).what(),
              HasSubstr("23 bytes instead of 24"));
  EXPECT_THAT(error({{"a/other", "x"}}).what(), HasSubstr("no record 'data.pkl'"));
  EXPECT_EQ(error({{"a/data.pkl", one_tensor_pickle()}, {"a/constants.pkl", "x"}}).kind(), ErrorKind::kUnsupported);
  EXPECT_EQ(
      error({{"a/data.pkl", one_tensor_pickle()}, {"a/data/0", std::string(24, 'x')}, {"a/version", "11\n"}}).kind(),
      ErrorKind::kUnsupported);
  EXPECT_EQ(
      error({{"a/data.pkl", one_tensor_pickle()}, {"a/data/0", std::string(24, 'x')}, {"a/byteorder", "pdp"}}).kind(),
      ErrorKind::kCorrupt);
  put_file(path, std::string("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15));
  EXPECT_TRUE(is_pt(local_storage(), path));
  EXPECT_THAT(thrown([&] { read_pt(local_storage(), path); }).what(), HasSubstr("truncated"));
  put_file(path, "hello");
  EXPECT_FALSE(is_pt(local_storage(), path));
  EXPECT_EQ(thrown([&] { read_pt(local_storage(), path); }).kind(), ErrorKind::kCorrupt);
}

TEST(Pt, BigEndianFilesAreSwapped) {
  TestFolder folder;
  std::string big;
  for (int i = 1; i <= 6; ++i) {
    const float value = static_cast<float>(i);
    for (int b = 3; b >= 0; --b) big += reinterpret_cast<const char*>(&value)[b];
  }
  write_zip(folder / "m.pt", {{"a/data.pkl", one_tensor_pickle()}, {"a/byteorder", "big"}, {"a/data/0", big}});
  EXPECT_EQ(read_tensor<float>(read_pt(local_storage(), folder / "m.pt"), "w"), counted<float>(6));
}

TEST(Pt, HostileRecordsOfOursAreRefused) {
  TestFolder folder;
  const std::string path = folder / "m.pt";
  const std::string tail = R"(,"extra":null,"crc":"00000000"})";
  for (const std::string& record : {std::string("{"), std::string("[]"), std::string("{}"),
                                    R"({"version":1,"block_size":1048576,"covered":1,"slices":[])" + tail,
                                    R"({"version":1,"block_size":0,"covered":320,"slices":[])" + tail,
                                    R"({"version":"x","block_size":1048576,"covered":320,"slices":[])" + tail}) {
    write_zip(path,
              {{"a/data.pkl", one_tensor_pickle()}, {"a/data/0", std::string(24, 'x')}, {"a/shardsmith", record}});
    const Error e = thrown([&] { read_pt(local_storage(), path); });
    EXPECT_EQ(e.kind(), ErrorKind::kCorrupt) << record << e.what();
    EXPECT_THAT(e.what(), HasSubstr("shardsmith"));
  }
}

TEST(Pt, TheWriterRefusesWhatWouldNotBeReadable) {
  TestFolder folder;
  const auto error = [&](const std::function<void(PtContent&)>& change) {
    PtContent content = small();
    change(content);
    return thrown([&] { write_pt(local_storage(), folder / "m.pt", content); });
  };
  EXPECT_EQ(error([](PtContent& c) { c.tensors[0].offset = 1; }).kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(error([](PtContent& c) { c.tensors[0].storage = 1; }).kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(error([](PtContent& c) { c.tensors[0].box.offset = {1, 0}; }).kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(error([](PtContent& c) { c.value = Value(1); }).kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(error([](PtContent& c) { c.value = Value(TensorRef{9}); }).kind(), ErrorKind::kInvalidArgument);
  EXPECT_FALSE(local_storage().stat(folder / "m.pt").exists) << "nothing was begun";
}

TEST(Pt, WriteErrorsReachTheCallerAtAnyCall) {
  TestFolder folder;
  const auto values = counted<uint32_t>(6 << 20);
  PtContent content;
  content.storages = {{values.size() * 4, reinterpret_cast<const std::byte*>(values.data()), {}}};
  content.tensors = {{Dtype::kI32, 0, 0, {6 << 20}, {1}, false, "", {}, {}}};
  content.value.set("x", Value(TensorRef{0}));
  FaultyStorage counting(local_storage());
  write_pt(counting, folder / "m.pt", content);
  ASSERT_GE(counting.calls(), 5);
  for (int64_t at = 0; at < counting.calls(); ++at)
    for (Fault::Kind kind : {Fault::Kind::kIoError, Fault::Kind::kNoSpace}) {
      if (kind == Fault::Kind::kNoSpace && at == counting.calls() - 1) continue;  // a sync needs no space
      FaultyStorage faulty(local_storage(), {kind, at});
      EXPECT_EQ(thrown([&] { write_pt(faulty, folder / "m.pt", content); }).kind(), ErrorKind::kIo) << at;
    }
}

TEST(Pt, APlainFileHasNoRecord) {
  TestFolder folder;
  PtContent content = small();
  content.with_slices = false;
  EXPECT_EQ(write_pt(local_storage(), folder / "m.pt", content).digest, "");
  EXPECT_FALSE(read_pt_record(local_storage(), folder / "m.pt").present);
  EXPECT_EQ(read_tensor<float>(read_pt(local_storage(), folder / "m.pt"), "w"), counted<float>(6));
}

}  // namespace
}  // namespace shardsmith
