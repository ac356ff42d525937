#include "layout/index.h"

#include <gtest/gtest.h>

#include <chrono>

#include "base/error.h"

namespace shardsmith {
namespace {

Slice slice(Box box, uint32_t file = 0, uint64_t offset = 0) {
  Strides strides = contiguous_strides(box.extent);
  return Slice{.box = std::move(box), .file = file, .offset = offset, .strides = std::move(strides)};
}

Index one(Shape shape, std::vector<Slice> slices, uint64_t size = 1 << 20) {
  Index index;
  index.format = "test";
  index.files.push_back({"some.file", size, nullptr});
  index.tensors.push_back({"w", Dtype::kF32, std::move(shape), std::move(slices), ""});
  index.reindex();
  return index;
}

std::string why(const Index& index, bool cover = true) {
  try {
    validate(index, cover);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kCorrupt);
    return e.what();
  }
  return "";
}

TEST(Index, SlicesThatTileAreSound) {
  EXPECT_EQ(why(one({4, 6}, {slice({{0, 0}, {2, 6}}), slice({{2, 0}, {2, 3}}), slice({{2, 3}, {2, 3}})})), "");
  EXPECT_EQ(why(one({}, {slice({{}, {}})})), "");
  EXPECT_EQ(why(one({0, 5}, {})), "");
}

TEST(Index, AHoleAnOverlapAndAStrayBoxAreNamed) {
  EXPECT_NE(why(one({4, 6}, {slice({{0, 0}, {3, 6}})})).find("hold 18 of its 24"), std::string::npos);
  EXPECT_EQ(why(one({4, 6}, {slice({{0, 0}, {3, 6}})}), false), "");
  const std::string twice = why(one({4, 6}, {slice({{0, 0}, {3, 6}}), slice({{1, 0}, {1, 6}})}));
  EXPECT_NE(twice.find("'w'"), std::string::npos) << twice;
  EXPECT_NE(twice.find("overlaps box [1:2, 0:6]"), std::string::npos) << twice;
  EXPECT_NE(why(one({4, 6}, {slice({{2, 0}, {3, 6}})}), false), "");
  EXPECT_NE(why(one({}, {slice({{}, {}}), slice({{}, {}})})), "");  // a scalar stored twice
}

TEST(Index, BytesBeyondTheFileAndOverflowsAreFound) {
  EXPECT_EQ(why(one({4, 6}, {slice(whole({4, 6}))}, 96)), "");
  EXPECT_NE(why(one({4, 6}, {slice(whole({4, 6}))}, 95)).find("some.file"), std::string::npos);
  Slice far = slice(whole({4, 6}), 0, UINT64_MAX - 3);
  EXPECT_NE(why(one({4, 6}, {far})), "");
  Slice wide = slice(whole({4, 6}));
  wide.strides = {INT64_MAX, 1};
  EXPECT_NE(why(one({4, 6}, {wide})), "");
  wide.strides = {-6, 1};
  EXPECT_NE(why(one({4, 6}, {wide})), "");
  EXPECT_NE(why(one({4, 6}, {slice(whole({4, 6}), 7)})), "");
}

TEST(Index, MergeJoinsTheSlicesOfOneName) {
  Index a = one({4, 6}, {slice({{0, 0}, {2, 6}})});
  a.merge(one({4, 6}, {slice({{2, 0}, {2, 6}})}));
  ASSERT_EQ(a.tensors.size(), 1u);
  EXPECT_EQ(a.tensors[0].slices[1].file, 1u);
  EXPECT_EQ(why(a), "");
  EXPECT_NE(a.find("w"), nullptr);
  EXPECT_EQ(a.find("v"), nullptr);
  EXPECT_THROW(a.merge(one({4, 7}, {})), Error);
  a.tensors.push_back(a.tensors[0]);
  EXPECT_THROW(a.reindex(), Error);
}

// The time of a quadratic check would be hours.
TEST(Index, AMillionSlicesAreCheckedInSeconds) {
  std::vector<Slice> grid;
  for (int64_t r = 0; r < 1000; ++r) {
    for (int64_t c = 0; c < 1000; ++c) grid.push_back(slice({{r * 2, c * 3}, {2, 3}}));
  }
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(why(one({2000, 3000}, grid)), "");
  grid[500500].box.offset[1] += 1;
  EXPECT_NE(why(one({2000, 3000}, grid)).find("overlaps"), std::string::npos);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

// A flattened tensor over n ranks: each range is the end of a row, whole rows, and the begin of a row.
TEST(Index, RangesOfAFlattenedTensorAreChecked) {
  const int64_t rows = 30000, columns = 7, per = 11;
  std::vector<Slice> ranges;
  for (int64_t begin = 0; begin < rows * columns; begin += per) {
    int64_t at = begin;
    const int64_t end = std::min(begin + per, rows * columns);
    while (at < end) {
      const int64_t row = at / columns, column = at % columns;
      if (column == 0 && end - at >= columns) {
        const int64_t whole_rows = (end - at) / columns;
        ranges.push_back(slice({{row, 0}, {whole_rows, columns}}));
        at += whole_rows * columns;
      } else {
        const int64_t n = std::min(end - at, columns - column);
        ranges.push_back(slice({{row, column}, {1, n}}));
        at += n;
      }
    }
  }
  EXPECT_EQ(why(one({rows, columns}, ranges)), "");
  ranges.pop_back();
  EXPECT_NE(why(one({rows, columns}, ranges)), "");
}

}  // namespace
}  // namespace shardsmith
