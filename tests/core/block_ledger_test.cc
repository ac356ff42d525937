#include "storage/block_ledger.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "base/checksum.h"
#include "base/error.h"
#include "memory_storage.h"

namespace shardsmith {
namespace {

struct Fixture {
  MemoryStorage storage;
  std::vector<std::byte> bytes;
  std::vector<FileEntry> files;

  explicit Fixture(size_t size, size_t covered) : bytes(size) {
    std::mt19937 random(3);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    auto sums = std::make_shared<BlockChecksums>();
    sums->block_size = 1000;
    sums->covered = covered;
    for (size_t at = 0; at < covered; at += 1000)
      sums->crc.push_back(crc32(std::span(bytes).subspan(at, std::min<size_t>(1000, covered - at))));
    files.push_back({"f", size, sums});
    const auto file = storage.create("f", Access::kBuffered, 0);
    file->write(0, bytes);
    file->close();
  }
  std::span<const std::byte> part(size_t begin, size_t end) const {
    return std::span(bytes).subspan(begin, end - begin);
  }
};

TEST(BlockLedger, AcceptsAnyPiecesInAnyOrderAndReadsOnlyTheHoles) {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    Fixture f(7777, 7300);
    BlockLedger ledger(f.files, {});
    std::vector<bool> seen(f.bytes.size(), false);
    for (int i = 0; i < 12; ++i) {
      const size_t begin = random() % f.bytes.size(), end = begin + random() % (f.bytes.size() - begin + 1);
      ledger.see(0, begin, f.part(begin, end));
      std::fill(seen.begin() + static_cast<long>(begin), seen.begin() + static_cast<long>(end), true);
    }
    uint64_t holes = 0;
    for (size_t block = 0; block < 7300; block += 1000) {
      const size_t end = std::min<size_t>(block + 1000, 7300);
      const auto open = static_cast<uint64_t>(
          std::count(seen.begin() + static_cast<long>(block), seen.begin() + static_cast<long>(end), false));
      if (open < end - block) holes += open;
    }
    EXPECT_EQ(ledger.finish(f.storage), holes);
  }
}

TEST(BlockLedger, NamesWhatLiesInADamagedBlock) {
  Fixture f(3000, 3000);
  BlockLedger ledger(f.files,
                     [](uint32_t, uint64_t begin, uint64_t end) { return str("tensor 'w' of ", begin, "-", end); });
  f.bytes[1500] ^= std::byte{1};
  ledger.see(0, 0, f.part(0, 1600));
  try {
    ledger.see(0, 1600, f.part(1600, 3000));
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kCorrupt);
    EXPECT_NE(std::string(e.what()).find("bytes 1000 to 2000"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("'w' of 1000-2000"), std::string::npos) << e.what();
  }
}

TEST(BlockLedger, FindsDamageInBytesThatNobodyAskedFor) {
  Fixture f(2000, 2000);
  BlockLedger ledger(f.files, {});
  ledger.see(0, 100, f.part(100, 900));
  f.bytes[50] ^= std::byte{1};
  const auto file = f.storage.create("f", Access::kBuffered, 0);
  file->write(0, f.bytes);
  file->close();
  EXPECT_THROW(ledger.finish(f.storage), Error);
}

}  // namespace
}  // namespace shardsmith
