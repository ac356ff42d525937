// A file read by several threads, and elements as numbers and text.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <mutex>

#include "storage/numbers.h"
#include "storage/parallel_read.h"
#include "test_files.h"

namespace shardsmith {
namespace {

class MemoryFile final : public ReadFile {
 public:
  explicit MemoryFile(size_t size) : bytes_(counted<uint8_t>(size)) {}
  uint64_t size() const override { return bytes_.size(); }
  const std::string& path() const override { return path_; }
  void read(uint64_t offset, std::span<std::byte> out) override {
    ASSERT_LE(offset + out.size(), bytes_.size());
    for (const uint64_t bad : bad_) {
      if (offset <= bad && bad < offset + out.size()) fail(ErrorKind::kIo, "byte ", bad);
    }
    std::memcpy(out.data(), bytes_.data() + offset, out.size());
  }
  std::vector<uint8_t> bytes_;
  std::vector<uint64_t> bad_;

 private:
  std::string path_ = "memory";
};

TEST(ParallelReader, GivesEveryByteOfARangeOnceInAnyNumberOfThreads) {
  MemoryFile file(300001);
  for (const int threads : {1, 2, 5}) {
    ParallelReader reader(threads, 8192);
    for (const auto& [begin, end] : std::vector<std::pair<uint64_t, uint64_t>>{
             {0, 300001}, {0, 0}, {5, 6}, {4095, 4097}, {100, 299999}, {8192, 16384}, {299000, 300001}}) {
      std::vector<int> seen(file.size());
      std::mutex mutex;
      reader.read(file, begin, end, [&](uint64_t at, std::span<const std::byte> bytes) {
        const std::lock_guard lock(mutex);
        for (size_t i = 0; i < bytes.size(); ++i) {
          EXPECT_EQ(static_cast<uint8_t>(bytes[i]), file.bytes_[at + i]);
          ++seen[at + i];
        }
      });
      for (uint64_t i = 0; i < file.size(); ++i) ASSERT_EQ(seen[i], i >= begin && i < end) << i;
    }
  }
}

TEST(ParallelReader, TheFirstErrorInTheFileIsTheOneThatIsThrown) {
  MemoryFile file(300001);
  file.bad_ = {250000, 100000, 200000};
  for (const int threads : {1, 3}) {
    ParallelReader reader(threads, 8192);
    for (int round = 0; round < 20; ++round) {
      const Error error =
          thrown([&] { reader.read(file, 0, file.size(), [](uint64_t, std::span<const std::byte>) {}); });
      EXPECT_STREQ(error.what(), "byte 100000");
    }
  }
}

TEST(Numbers, ElementsAreTextThatTellsThemApart) {
  const auto text = [](Dtype dtype, auto value) {
    return element_text(dtype, reinterpret_cast<const std::byte*>(&value));
  };
  EXPECT_EQ(text(Dtype::kF32, 0.1f), "0.1");
  EXPECT_EQ(text(Dtype::kF64, 0.1), "0.1");
  EXPECT_EQ(text(Dtype::kI64, std::numeric_limits<int64_t>::min()), "-9223372036854775808");
  EXPECT_EQ(text(Dtype::kU64, std::numeric_limits<uint64_t>::max()), "18446744073709551615");
  EXPECT_EQ(text(Dtype::kU32, 4294967295u), "4294967295");
  EXPECT_EQ(text(Dtype::kI8, static_cast<int8_t>(-3)), "-3");
  EXPECT_EQ(text(Dtype::kBool, true), "true");
  EXPECT_EQ(text(Dtype::kBF16, static_cast<uint16_t>(0x3fc0)), "1.5");
  EXPECT_EQ(text(Dtype::kF16, static_cast<uint16_t>(0xfc00)), "-inf");
  EXPECT_EQ(text(Dtype::kC64, std::array<float, 2>{1, -2.5f}), "1-2.5j");
  EXPECT_EQ(text(Dtype::kF8E4M3, static_cast<uint8_t>(0x7e)), "448");
}

}  // namespace
}  // namespace shardsmith
