// The zip container: what is written is read, what is wrong is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include "base/checksum.h"
#include "format/bytes.h"
#include "format/zip.h"
#include "test_files.h"

namespace shardsmith {
namespace {

using ::testing::HasSubstr;

struct Entry {
  std::string name, data;
  uint64_t alignment = 64;
};

std::string archive(const std::vector<Entry>& entries) {
  ZipLayout layout;
  for (const Entry& e : entries) layout.add(e.name, e.data.size(), e.alignment);
  std::string out;
  std::vector<uint32_t> crcs;
  for (size_t i = 0; i < entries.size(); ++i) {
    EXPECT_EQ(out.size(), layout.records()[i].header);
    out += layout.local_header(i);
    EXPECT_EQ(out.size(), layout.records()[i].data);
    EXPECT_EQ(out.size() % entries[i].alignment, 0u);
    out += entries[i].data;
    crcs.push_back(crc32(std::as_bytes(std::span(entries[i].data))));
    out += layout.descriptor(i, crcs.back());
  }
  EXPECT_EQ(out.size(), layout.end());
  return out + layout.directory(crcs);
}

std::vector<ZipRecord> read(const std::string& bytes, std::vector<std::string>* data = nullptr) {
  TestFolder folder;
  put_file(folder / "z", bytes);
  const auto file = local_storage().open_read(folder / "z");
  const auto records = read_zip(*file);
  if (data)
    for (const ZipRecord& r : records) data->push_back(read_record(*file, r, 1 << 20));
  return records;
}

const std::vector<Entry> kEntries{{"archive/data.pkl", "some bytes"},
                                  {"archive/data/0", std::string(70000, 'x'), 4096},
                                  {"archive/empty", ""},
                                  {"archive/version", "3\n"}};

TEST(Zip, WhatIsWrittenIsRead) {
  std::vector<std::string> data;
  const auto records = read(archive(kEntries), &data);
  ASSERT_EQ(records.size(), kEntries.size());
  for (size_t i = 0; i < records.size(); ++i) {
    EXPECT_EQ(records[i].name, kEntries[i].name);
    EXPECT_EQ(data[i], kEntries[i].data);
  }
}

TEST(Zip, EveryPrefixIsRefused) {
  const std::string all = archive({{"a/b", "12345"}, {"a/c", std::string(40, 'y')}});
  TestFolder folder;
  for (size_t n = 0; n < all.size(); ++n) {
    put_file(folder / "z", std::string_view(all).substr(0, n));
    const auto file = local_storage().open_read(folder / "z");
    EXPECT_EQ(thrown([&] { read_zip(*file); }).kind(), ErrorKind::kCorrupt) << n;
  }
}

TEST(Zip, EveryFlippedByteGivesAnErrorOrTheSameData) {
  const std::vector<Entry> entries{{"a/b", "12345"}, {"a/c", std::string(40, 'y')}};
  const std::string all = archive(entries);
  TestFolder folder;
  size_t refused = 0;
  for (size_t at = 0; at < all.size(); ++at) {
    for (int bit : {0, 3, 7}) {
      std::string bad = all;
      bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
      put_file(folder / "z", bad);
      const auto file = local_storage().open_read(folder / "z");
      try {
        for (const ZipRecord& r : read_zip(*file)) {
          const std::string data = read_record(*file, r, 1 << 20);
          if (r.name == "a/b" && r.crc != 0) {
            EXPECT_EQ(data, "12345");
          }
        }
      } catch (const Error& e) {
        EXPECT_TRUE(e.kind() == ErrorKind::kCorrupt || e.kind() == ErrorKind::kUnsupported);
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, all.size());
}

TEST(Zip, DuplicateNamesAreRefused) {
  const Error e = thrown([] { read(archive({{"a/b", "1"}, {"a/b", "2"}})); });
  EXPECT_EQ(e.kind(), ErrorKind::kCorrupt);
  EXPECT_THAT(e.what(), HasSubstr("'a/b' stands twice"));
}

// Overwrites fields of the first entry in the central directory.
std::string patched(std::string bytes, size_t field, uint32_t value) {
  const size_t at = bytes.find("PK\x01\x02") + field;
  for (int i = 0; i < 4; ++i) bytes[at + i] = static_cast<char>(value >> (8 * i));
  return bytes;
}

TEST(Zip, SizesThatCannotBeAreRefused) {
  const std::string all = archive({{"a/b", "12345"}, {"a/c", "67"}});
  EXPECT_EQ(thrown([&] { read(patched(all, 24, 6)); }).kind(), ErrorKind::kCorrupt);           // stored 5, declared 6
  EXPECT_EQ(thrown([&] { read(patched(all, 20, 1 << 30)); }).kind(), ErrorKind::kCorrupt);     // leaves the file
  EXPECT_EQ(thrown([&] { read(patched(all, 42, 0xfffffff0)); }).kind(), ErrorKind::kCorrupt);  // header outside
  std::string bomb = patched(all, 24, 1 << 30);  // 5 deflated bytes that claim to be a gigabyte
  bomb[bomb.find("PK\x01\x02") + 10] = 8;
  const Error e = thrown([&] { read(bomb); });
  EXPECT_EQ(e.kind(), ErrorKind::kCorrupt);
  EXPECT_THAT(e.what(), HasSubstr("more than 5 deflated bytes can hold"));
}

TEST(Zip, OverlappingRecordsAreRefused) {
  // Both entries point at the first local header: the quoted-overlap bomb.
  std::string all = archive({{"a/b", "12345"}, {"a/b", "67"}});
  const size_t first = all.find("PK\x01\x02"), second = all.find("PK\x01\x02", first + 4);
  all.replace(second + 42, 4, all.substr(first + 42, 4));
  all.replace(second + 20, 8, all.substr(first + 20, 8));
  EXPECT_EQ(thrown([&] { read(all); }).kind(), ErrorKind::kCorrupt);
}

TEST(Zip, LargeSizesAndOffsetsUseZip64) {
  ZipLayout layout;
  const uint64_t five = uint64_t{5} << 30;
  layout.add("a/big", five, 4096);
  layout.add("a/after", 10, 64);
  EXPECT_EQ(layout.local_header(0).size(), layout.records()[0].data - layout.records()[0].header);
  EXPECT_EQ(layout.descriptor(0, 1).size(), 24u);
  EXPECT_EQ(layout.local_header(1).size(), layout.records()[1].data - layout.records()[1].header);
  // A sparse file with the real bytes at both ends.
  TestFolder folder;
  {
    const auto file = local_storage().create(folder / "z");
    const auto write = [&](uint64_t at, const std::string& bytes) { file->write(at, std::as_bytes(std::span(bytes))); };
    write(0, layout.local_header(0));
    write(layout.records()[0].data + five, layout.descriptor(0, 0));
    write(layout.records()[1].header, layout.local_header(1) + "0123456789" + layout.descriptor(1, 0));
    write(layout.end(), layout.directory({0, 0}));
    file->close();
  }
  const auto file = local_storage().open_read(folder / "z");
  const auto records = read_zip(*file);
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0].size, five);
  EXPECT_EQ(records[1].header, layout.records()[1].header);
  EXPECT_EQ(read_record(*file, records[1], 100), "0123456789");
  EXPECT_EQ(thrown([&] { read_record(*file, records[0], 100); }).kind(), ErrorKind::kCorrupt);
}

}  // namespace
}  // namespace shardsmith
