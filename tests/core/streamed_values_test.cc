// Values in windows: boxes, reading threads, and what diff makes of a disk that fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <set>

#include "cli/diff.h"
#include "cli/values_check.h"
#include "cli/values_stream.h"
#include "format/safetensors.h"
#include "storage/faulty_storage.h"
#include "test_files.h"

namespace shardsmith {
namespace {

using namespace cli;
using testing::HasSubstr;

TEST(BoxCutter, BoxesTileAnyShapeAndKeepTheLimit) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    Shape shape(random() % 5);
    for (int64_t& extent : shape) extent = static_cast<int64_t>(random() % 7);
    const int64_t most = 1 + static_cast<int64_t>(random() % 40);
    BoxCutter cutter(shape, most, random() % 5);
    std::set<Shape> seen;
    Box box;
    while (cutter.next(box)) {
      ASSERT_TRUE(inside(box, shape));
      ASSERT_LE(volume(box.extent), most);
      for (int64_t i = 0; i < volume(box.extent); ++i) {
        Shape at(shape.size());
        int64_t rest = i;
        for (size_t d = at.size(); d-- > 0;) at[d] = box.offset[d] + rest % box.extent[d], rest /= box.extent[d];
        ASSERT_TRUE(seen.insert(at).second) << to_string(shape) << " " << to_string(box);
      }
    }
    ASSERT_EQ(static_cast<int64_t>(seen.size()), volume(shape)) << to_string(shape) << " by " << most;
  }
}

TEST(BoxCutter, CutsAlongTheWantedDimensionFirst) {
  BoxCutter cutter({4, 6}, 8, 1);
  Box box;
  ASSERT_TRUE(cutter.next(box));
  EXPECT_EQ(to_string(box), "[0:4, 0:2]");
}

// A file with one tensor, its rows in slices of their own, each in an order of dimensions of its own.
Index scattered(const std::string& path, const Shape& shape, const std::vector<uint32_t>& values,
                std::mt19937& random) {
  Index index;
  index.format = "test";
  TensorEntry entry{"x", Dtype::kI32, shape, {}, ""};
  std::string bytes;
  for (int64_t row = 0; row < shape[0];) {
    const int64_t rows = std::min<int64_t>(1 + static_cast<int64_t>(random() % 5), shape[0] - row);
    bytes.append(random() % 9, '\xee');
    Slice slice;
    slice.box = Box{{row, 0}, {rows, shape[1]}};
    slice.offset = bytes.size();
    const bool turned = random() % 2 == 0;
    slice.strides = turned ? Strides{1, rows} : Strides{shape[1], 1};
    std::vector<uint32_t> part(static_cast<size_t>(rows * shape[1]));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < shape[1]; ++c)
        part[static_cast<size_t>(r * slice.strides[0] + c * slice.strides[1])] =
            values[static_cast<size_t>((row + r) * shape[1] + c)];
    }
    bytes.append(reinterpret_cast<const char*>(part.data()), part.size() * 4);
    entry.slices.push_back(slice);
    row += rows;
  }
  put_file(path, bytes);
  index.files.push_back({path, bytes.size(), nullptr});
  index.tensors.push_back(entry);
  index.reindex();
  validate(index);
  return index;
}

TEST(StreamValues, TheSameBoxesComeFromBothSidesWhateverTheirSlices) {
  const TestFolder folder;
  std::mt19937 random(11);
  for (int round = 0; round < 20; ++round) {
    const Shape shape{1 + static_cast<int64_t>(random() % 60), 1 + static_cast<int64_t>(random() % 60)};
    const auto values = counted<uint32_t>(static_cast<size_t>(volume(shape)));
    const Index a = scattered(folder / "a", shape, values, random), b = scattered(folder / "b", shape, values, random);
    std::vector<uint32_t> got(values.size());
    StreamOptions options;
    stream_values({&a, &b}, {{{a.find("x"), b.find("x")}}}, local_storage(), options, [&](const StreamedBox& box) {
      ASSERT_EQ(box.sides.size(), 2u);
      ASSERT_EQ(std::memcmp(box.sides[0].data(), box.sides[1].data(), box.sides[0].size()), 0);
      for (int64_t i = 0; i < volume(box.box.extent); ++i) {
        const int64_t row = box.box.offset[0] + i / box.box.extent[1],
                      column = box.box.offset[1] + i % box.box.extent[1];
        std::memcpy(&got[static_cast<size_t>(row * shape[1] + column)], box.sides[0].data() + i * 4, 4);
      }
    });
    EXPECT_EQ(got, values);
  }
}

TEST(StreamValues, WhatTheVisitorThrowsEndsIt) {
  const TestFolder folder;
  std::mt19937 random(1);
  const Index a = scattered(folder / "a", {8, 8}, counted<uint32_t>(64), random);
  const Error error = thrown([&] {
    stream_values({&a}, {{{a.find("x")}}}, local_storage(), {},
                  [](const StreamedBox&) { fail(ErrorKind::kMismatch, "enough"); });
  });
  EXPECT_STREQ(error.what(), "enough");
}

// Two files of one tensor each, of which one element differs.
std::pair<std::string, std::string> two_files(const TestFolder& folder, size_t n) {
  std::vector<float> values = counted<float>(n);
  for (const char* name : {"a", "b"}) {
    SafetensorsTensor tensor{"w", Dtype::kF32, {static_cast<int64_t>(n)}, {}};
    tensor.source = {n * 4, reinterpret_cast<const std::byte*>(values.data()), {}};
    write_safetensors(local_storage(), folder / name, {tensor}, {});
    values[n / 2] = NAN;
  }
  return {folder / "a", folder / "b"};
}

TEST(Diff, AReadThatFailsIsAnErrorAndNeverEqual) {
  const TestFolder folder;
  const auto [a, b] = two_files(folder, 600'000);
  DiffOptions options;
  const DiffResult right = diff(local_storage(), a, b, options);
  ASSERT_EQ(right.tensors.size(), 1u);
  EXPECT_EQ(right.tensors[0].where, Shape{300'000});
  EXPECT_EQ(right.tensors[0].b_element, "nan");
  int failed = 0;
  for (int64_t at = 0; at < 40; ++at) {
    FaultyStorage faulty(local_storage(), {Fault::Kind::kShortRead, at});
    try {
      EXPECT_FALSE(diff(faulty, a, b, options).equal()) << "read " << at;
    } catch (const Error& e) {
      ++failed;
      EXPECT_THAT(e.what(), testing::AnyOf(HasSubstr(a), HasSubstr(b)));
    }
  }
  EXPECT_GT(failed, 4);
  EXPECT_LT(failed, 40);
}

TEST(CheckValues, AReadThatFailsIsAnError) {
  const TestFolder folder;
  const std::string b = two_files(folder, 600'000).second;
  const Index index = read_safetensors(local_storage(), b);
  EXPECT_EQ(check_values(index, local_storage(), {}).not_finite.size(), 1u);
  FaultyStorage faulty(local_storage(), {Fault::Kind::kShortRead, 0});
  EXPECT_EQ(thrown([&] { check_values(index, faulty, {}); }).kind(), ErrorKind::kCorrupt);
}

}  // namespace
}  // namespace shardsmith
