#include "layout/range.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace shardsmith {
namespace {

// The row-major numbers of a box's elements, in the box's own row-major order.
std::vector<int64_t> numbers_of(const Shape& shape, const Box& box) {
  std::vector<int64_t> numbers{0};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<int64_t> next;
    for (const int64_t n : numbers)
      for (int64_t i = 0; i < box.extent[d]; ++i) next.push_back(n * shape[d] + box.offset[d] + i);
    numbers = std::move(next);
  }
  return numbers;
}

TEST(Range, IsItsBoxesInOrder) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    Shape shape(random() % 5);
    for (int64_t& extent : shape) extent = static_cast<int64_t>(random() % 6);
    const int64_t count = volume(shape);
    int64_t begin = count ? static_cast<int64_t>(random()) % (count + 1) : 0;
    int64_t end = count ? static_cast<int64_t>(random()) % (count + 1) : 0;
    if (begin > end) std::swap(begin, end);
    const std::vector<Box> boxes = boxes_of_range(shape, begin, end);
    EXPECT_LE(boxes.size(), shape.empty() ? 1 : 2 * shape.size() - 1);
    std::vector<int64_t> found;
    for (const Box& box : boxes) {
      EXPECT_TRUE(inside(box, shape)) << to_string(box);
      const auto numbers = numbers_of(shape, box);
      found.insert(found.end(), numbers.begin(), numbers.end());
    }
    std::vector<int64_t> expected(static_cast<size_t>(end - begin));
    std::iota(expected.begin(), expected.end(), begin);
    EXPECT_EQ(found, expected) << to_string(shape) << " " << begin << " " << end;
  }
}

}  // namespace
}  // namespace shardsmith
