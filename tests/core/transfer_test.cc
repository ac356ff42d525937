// Executing plans: copies of every kind against a plain loop, casts, checksums, budgets, faults.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "base/checksum.h"
#include "counting_storage.h"
#include "storage/convert.h"
#include "storage/faulty_storage.h"
#include "storage/transfer.h"
#include "test_files.h"

namespace shardsmith {
namespace {

using ::testing::HasSubstr;

// A copy by a plain loop over all indices.
void naive(const Copy& copy, std::span<const std::byte> source, std::span<std::byte> destination) {
  const int64_t size = size_of(copy.from);
  int64_t count = 1;
  for (int64_t n : copy.extent) count *= n;
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, s = static_cast<int64_t>(copy.source), d = static_cast<int64_t>(copy.offset);
    for (size_t k = copy.extent.size(); k-- > 0;) {
      s += rest % copy.extent[k] * copy.source_step[k];
      d += rest % copy.extent[k] * copy.destination_step[k];
      rest /= copy.extent[k];
    }
    for (int64_t b = 0; b < size; ++b) destination[d + b] = source[s + (copy.byte_swapped ? size - 1 - b : b)];
  }
}

TEST(RunCopy, EqualsAPlainLoopForRandomPermutationsOfLoops) {
  std::mt19937 random(11);
  const std::vector<Dtype> dtypes{Dtype::kU8, Dtype::kI16, Dtype::kF32, Dtype::kI64, Dtype::kC128};
  for (int round = 0; round < 600; ++round) {
    const size_t rank = random() % 5;
    Copy copy;
    copy.from = copy.to = dtypes[random() % dtypes.size()];
    const int64_t size = size_of(copy.from);
    copy.byte_swapped = copy.from != Dtype::kC128 && random() % 4 == 0;
    std::vector<size_t> order(rank);
    std::iota(order.begin(), order.end(), 0);
    for (size_t d = 0; d < rank; ++d) copy.extent.push_back(1 + random() % (rank < 3 ? 70 : 9));
    const auto steps = [&](std::vector<int64_t>& out) {
      std::shuffle(order.begin(), order.end(), random);
      out.resize(rank);
      int64_t step = size;
      for (size_t d : order) {
        out[d] = step;
        step *= copy.extent[d] + static_cast<int64_t>(random() % 3 == 0);
      }
      return step;
    };
    copy.source = random() % 9;
    copy.offset = random() % 9;
    std::vector<std::byte> source(steps(copy.source_step) + copy.source);
    std::vector<std::byte> expected(steps(copy.destination_step) + copy.offset), found(expected.size());
    for (auto& b : source) b = static_cast<std::byte>(random());
    naive(copy, source, expected);
    run_copy(copy, source, found);
    ASSERT_EQ(expected, found) << "round " << round;
  }
}

TEST(RunCopy, ComplexNumbersAreSwappedByHalves) {
  const std::vector<unsigned char> in{1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<unsigned char> out(8);
  run_copy({0, 0, 0, {1}, {8}, {8}, Dtype::kC64, Dtype::kC64, true}, std::as_bytes(std::span(in)),
           std::as_writable_bytes(std::span(out)));
  EXPECT_EQ(out, (std::vector<unsigned char>{4, 3, 2, 1, 8, 7, 6, 5}));
}

TEST(RunCopy, NeverLeavesItsBuffers) {
  std::vector<std::byte> eight(8), seven(7);
  const Copy copy{0, 0, 0, {2}, {4}, {4}, Dtype::kF32, Dtype::kF32};
  EXPECT_NO_THROW(run_copy(copy, eight, eight));
  EXPECT_EQ(thrown([&] { run_copy(copy, seven, eight); }).kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(thrown([&] { run_copy(copy, eight, seven); }).kind(), ErrorKind::kInvalidArgument);
  Copy huge = copy;
  huge.extent = {INT64_MAX};
  huge.source_step = {INT64_MAX};
  EXPECT_EQ(thrown([&] { run_copy(huge, eight, eight); }).kind(), ErrorKind::kInvalidArgument);
  Copy back = copy;
  back.source_step = {-4};
  EXPECT_EQ(thrown([&] { run_copy(back, eight, eight); }).kind(), ErrorKind::kInvalidArgument);
}

TEST(Convert, EveryHalfAndEveryBfloat16ComesBack) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto b = static_cast<uint16_t>(bits);
    const float half = half_to_float(b), brain = bfloat16_to_float(b);
    if (std::isnan(half)) {
      EXPECT_TRUE(std::isnan(half_to_float(float_to_half(half))));
    } else {
      ASSERT_EQ(float_to_half(half), b);
    }
    if (std::isnan(brain)) {
      EXPECT_TRUE(std::isnan(bfloat16_to_float(float_to_bfloat16(brain))));
    } else {
      ASSERT_EQ(float_to_bfloat16(brain), b);
    }
  }
}

// The nearest of all halves, ties to the even one; from the definition.
uint16_t nearest_half(double value) {
  const double magnitude = std::fabs(value);
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (magnitude >= 65520) return sign | 0x7c00;
  uint16_t low = 0, high = 0x7bff;  // bits of non-negative halves are ordered
  while (low < high) {
    const auto middle = static_cast<uint16_t>((low + high + 1) / 2);
    if (half_to_float(middle) <= magnitude)
      low = middle;
    else
      high = middle - 1;
  }
  if (low == 0x7bff) return sign | low;
  const double down = magnitude - half_to_float(low), up = static_cast<double>(half_to_float(low + 1)) - magnitude;
  return sign | (down < up || (down == up && low % 2 == 0) ? low : static_cast<uint16_t>(low + 1));
}

TEST(Convert, RoundsToNearestEvenAlsoFromDoubles) {
  std::mt19937_64 random(5);
  const ConvertRow to_half = convert_row(Dtype::kF64, Dtype::kF16), from_float = convert_row(Dtype::kF32, Dtype::kF16);
  for (int i = 0; i < 20000; ++i) {
    double value = std::ldexp(static_cast<double>(random() % (1 << 24)), static_cast<int>(random() % 45) - 48);
    if (i % 3 == 0) value = half_to_float(static_cast<uint16_t>(random() % 0x7c00)) * (1 + std::ldexp(1.0, -11));
    if (i % 2) value = -value;
    if (i % 5 == 0) value = std::nextafter(value, i % 10 ? 1e9 : -1e9);
    uint16_t found = 0;
    to_half(reinterpret_cast<std::byte*>(&value), reinterpret_cast<std::byte*>(&found), 1, 8, 2);
    ASSERT_EQ(found, nearest_half(value)) << value;
    const float single = static_cast<float>(value);
    from_float(reinterpret_cast<const std::byte*>(&single), reinterpret_cast<std::byte*>(&found), 1, 4, 2);
    ASSERT_EQ(found, nearest_half(single)) << single;
  }
  EXPECT_EQ(float_to_bfloat16(std::bit_cast<float>(0x3f808000u)), 0x3f80);  // a tie goes to the even one
  EXPECT_EQ(float_to_bfloat16(std::bit_cast<float>(0x3f818000u)), 0x3f82);
  EXPECT_EQ(float_to_bfloat16(std::bit_cast<float>(0x3f808001u)), 0x3f81);
  // 1 + 2^-8 + 2^-40 rounds up; through a float that forgets the last term it would be a tie and go down.
  const double above_tie = 1 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40);
  uint16_t brain = 0;
  convert_row(Dtype::kF64, Dtype::kBF16)(reinterpret_cast<const std::byte*>(&above_tie),
                                         reinterpret_cast<std::byte*>(&brain), 1, 8, 2);
  EXPECT_EQ(brain, 0x3f81);
}

TEST(RunCopy, CastsSwappedAndStrided) {
  const std::vector<float> values{1.5f, -2.25f, 1e-8f, 65520.0f, 3.0f, 4.0f};
  std::vector<unsigned char> swapped(24);
  for (size_t i = 0; i < 24; ++i)
    swapped[i] = reinterpret_cast<const unsigned char*>(values.data())[i / 4 * 4 + 3 - i % 4];
  std::vector<double> out(6);
  const Copy copy{0, 0, 0, {2, 3}, {12, 4}, {8, 16}, Dtype::kF32, Dtype::kF64, true};
  run_copy(copy, std::as_bytes(std::span(swapped)), std::as_writable_bytes(std::span(out)));
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 3; ++j) EXPECT_EQ(out[j * 2 + i], values[i * 3 + j]);
  const Copy integer{0, 0, 0, {1}, {8}, {4}, Dtype::kI64, Dtype::kF32};
  EXPECT_EQ(thrown([&] {
              run_copy(integer, std::as_bytes(std::span(values)), std::as_writable_bytes(std::span(out)));
            }).kind(),
            ErrorKind::kUnsupported);
}

// A file of 4-byte counters with checksums, and an Index of `count` tensors in it, with holes between.
struct Fixture {
  TestFolder folder;
  Index index;
  std::vector<uint32_t> words;
  std::string path = folder / "data";

  explicit Fixture(uint64_t bytes, uint64_t covered, uint64_t block, size_t count, uint32_t seed) {
    words = counted<uint32_t>(bytes / 4);
    put_file(path, {reinterpret_cast<const char*>(words.data()), bytes});
    auto sums = std::make_shared<BlockChecksums>();
    sums->block_size = block;
    sums->covered = covered;
    const auto all = std::as_bytes(std::span(words));
    for (uint64_t at = 0; at < covered; at += block)
      sums->crc.push_back(crc32(all.subspan(at, std::min(block, covered - at))));
    index.files.push_back({path, bytes, sums});
    std::mt19937 random(seed);
    uint64_t at = 0;
    for (size_t i = 0; i < count; ++i) {
      at += random() % 3 ? 0 : random() % (bytes / count) / 4 * 4;
      const uint64_t room = (bytes - at) / 4;
      if (room == 0) break;
      const auto n = static_cast<int64_t>(1 + random() % std::min<uint64_t>(room, bytes / count / 3));
      index.tensors.push_back({"t" + std::to_string(i), Dtype::kI32, {n}, {{{{0}, {n}}, 0, at, {1}}}});
      at += static_cast<uint64_t>(n) * 4;
    }
    index.reindex();
  }

  // Reads every tensor; true if all values are right.
  void read(Storage& storage, const TransferOptions& options) const {
    Target target;
    std::vector<std::vector<uint32_t>> buffers;
    std::vector<Destination> destinations;
    for (const TensorEntry& t : index.tensors) {
      buffers.emplace_back(t.shape[0]);
      target.wants.push_back(
          {t.name, t.dtype, t.shape, whole(t.shape), static_cast<uint32_t>(buffers.size() - 1), 0, {1}});
    }
    for (auto& b : buffers) destinations.push_back({std::as_writable_bytes(std::span(b))});
    execute(make_plan(index, target, {256 << 10, 4 << 10}), index, destinations, storage, options);
    for (size_t i = 0; i < buffers.size(); ++i) {
      const uint64_t first = index.tensors[i].slices[0].offset / 4;
      for (size_t k = 0; k < buffers[i].size(); ++k) ASSERT_EQ(buffers[i][k], first + k + 1) << "tensor " << i;
    }
  }
};

TEST(Execute, ReadsEverythingRightUnderAnyBudgetAndThreads) {
  for (uint32_t seed = 0; seed < 12; ++seed) {
    const Fixture fixture(3'000'000, seed % 2 ? 3'000'000 : 2'345'678, seed % 3 ? 64 << 10 : 1 << 20, 40, seed);
    for (int threads : {1, 2, 5})
      for (uint64_t budget : {uint64_t{1}, uint64_t{1} << 20, uint64_t{64} << 20})
        fixture.read(local_storage(), {budget, threads, seed != 5, {}});
  }
}

TEST(Execute, ReadsEachByteOnceUpToPages) {
  const Fixture fixture(8'000'000, 8'000'000, 1 << 20, 20, 3);
  CountingStorage storage;
  fixture.read(storage, {1, 2, true, {}});
  EXPECT_LE(storage.direct + storage.buffered, 8'000'000 + 64 * 4096);
}

TEST(Execute, EveryDamagedByteUnderATensorIsFound) {
  Fixture fixture(300'000, 300'000, 64 << 10, 6, 1);
  std::mt19937 random(2);
  for (int round = 0; round < 60; ++round) {
    const TensorEntry& victim = fixture.index.tensors[random() % fixture.index.tensors.size()];
    const uint64_t at = victim.slices[0].offset + random() % (static_cast<uint64_t>(victim.shape[0]) * 4);
    std::string bytes = get_file(fixture.path);
    const std::string good = bytes;
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
    put_file(fixture.path, bytes);
    const Error e = thrown([&] { fixture.read(local_storage(), {1, 1 + round % 3, true, {}}); });
    EXPECT_EQ(e.kind(), ErrorKind::kCorrupt);
    EXPECT_THAT(e.what(), HasSubstr("'" + victim.name + "'"));
    EXPECT_THAT(e.what(), HasSubstr(fixture.path));
    put_file(fixture.path, good);
  }
}

TEST(Execute, AFileThatChangedOrEndsEarlyIsAnError) {
  Fixture fixture(300'000, 300'000, 64 << 10, 6, 1);
  FaultyStorage shorter(local_storage(), {Fault::Kind::kShortRead, 0});
  EXPECT_EQ(thrown([&] { fixture.read(shorter, {}); }).kind(), ErrorKind::kCorrupt);
  std::filesystem::resize_file(fixture.path, 200'000);
  EXPECT_EQ(thrown([&] { fixture.read(local_storage(), {}); }).kind(), ErrorKind::kCorrupt);
}

TEST(Execute, ProgressEndsAtItsTotal) {
  const Fixture fixture(300'000, 0, 64 << 10, 6, 1);
  ProgressEvent last;
  uint64_t before = 0;
  fixture.read(local_storage(), {1, 2, true, [&](const ProgressEvent& e) {
                                   EXPECT_GE(e.done, before);
                                   before = e.done;
                                   last = e;
                                 }});
  EXPECT_EQ(last.done, last.total);
  EXPECT_GT(last.total, 0u);
}

TEST(Execute, InflatesARecordAsFarAsItIsNeeded) {
  TestFolder folder;
  const auto words = counted<uint32_t>(500'000);
  std::vector<Bytef> packed(::compressBound(words.size() * 4));
  z_stream stream{};
  ASSERT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY), Z_OK);
  stream.next_in = const_cast<Bytef*>(reinterpret_cast<const Bytef*>(words.data()));
  stream.avail_in = static_cast<uInt>(words.size() * 4);
  stream.next_out = packed.data();
  stream.avail_out = static_cast<uInt>(packed.size());
  ASSERT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  const uint64_t stored = stream.total_out;
  deflateEnd(&stream);
  put_file(folder / "f", "head" + std::string(reinterpret_cast<char*>(packed.data()), stored));
  Index index;
  index.files.push_back({folder / "f", 4 + stored, nullptr});
  index.tensors.push_back({"a", Dtype::kI32, {1000}, {{{{0}, {1000}}, 0, 4, {1}, Encoding::kDeflated, stored, 400}}});
  index.tensors.push_back(
      {"b", Dtype::kI32, {10}, {{{{0}, {10}}, 0, 4, {3}, Encoding::kDeflated, stored, 1'999'000 - 120}}});
  index.tensors.push_back({"c", Dtype::kI32, {10}, {{{{0}, {10}}, 0, 4, {1}, Encoding::kDeflated, stored, 1'999'999}}});
  index.reindex();
  EXPECT_EQ(read_tensor<uint32_t>(index, "a")[999], 1100u);
  EXPECT_EQ(read_tensor<uint32_t>(index, "b")[9], (1'999'000 - 120) / 4 + 28);
  EXPECT_EQ(thrown([&] { read_tensor<uint32_t>(index, "c"); }).kind(), ErrorKind::kCorrupt);
}

}  // namespace
}  // namespace shardsmith
