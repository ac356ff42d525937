#include "layout/box.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "layout/dtype.h"

namespace shardsmith {
namespace {

TEST(Box, VolumeIsCheckedForOverflowAndNegatives) {
  EXPECT_EQ(volume({}), 1);
  EXPECT_EQ(volume({2, 3, 4}), 24);
  EXPECT_EQ(volume({int64_t{1} << 40, 0, int64_t{1} << 40}), 0);
  EXPECT_THROW(volume({int64_t{1} << 32, int64_t{1} << 31}), Error);
  EXPECT_THROW(volume({0, -1}), Error);
}

TEST(Box, IntersectionIsWhatBothShare) {
  EXPECT_EQ(intersect({{0, 2}, {4, 4}}, {{3, 0}, {4, 3}}), (Box{{3, 2}, {1, 1}}));
  EXPECT_FALSE(intersect({{0}, {4}}, {{4}, {4}}));
  EXPECT_EQ(intersect({{}, {}}, {{}, {}}), (Box{{}, {}}));  // a scalar is one element
}

TEST(Box, InsideNeverOverflows) {
  EXPECT_TRUE(inside({{1, 0}, {1, 3}}, {2, 3}));
  EXPECT_FALSE(inside({{1, 0}, {2, 3}}, {2, 3}));
  EXPECT_FALSE(inside({{INT64_MAX}, {INT64_MAX}}, {8}));
  EXPECT_FALSE(inside({{-1}, {2}}, {8}));
  EXPECT_FALSE(inside({{0}, {1}}, {8, 8}));
}

TEST(Box, StridesAndTexts) {
  EXPECT_EQ(contiguous_strides({2, 3, 4}), (Strides{12, 4, 1}));
  EXPECT_EQ(to_string(Shape{2, 3}), "[2, 3]");
  EXPECT_EQ(to_string(Box{{0, 3}, {2, 2}}), "[0:2, 3:5]");
}

TEST(Dtype, NamesGoThereAndBack) {
  for (int i = 0; i <= static_cast<int>(Dtype::kQI32); ++i) {
    const Dtype dtype = static_cast<Dtype>(i);
    EXPECT_EQ(dtype_from_torch(to_string(dtype)), dtype);
    const std::string_view name = safetensors_name(dtype);
    if (!name.empty()) {
      EXPECT_EQ(dtype_from_safetensors(name), dtype);
    }
  }
  EXPECT_EQ(size_of(Dtype::kBF16), 2);
  EXPECT_EQ(size_of(Dtype::kC128), 16);
  EXPECT_EQ(safetensors_name(Dtype::kC64), "C64");
  EXPECT_FALSE(dtype_from_safetensors(""));
  EXPECT_FALSE(dtype_from_torch("float"));
}

}  // namespace
}  // namespace shardsmith
