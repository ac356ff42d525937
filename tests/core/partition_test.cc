#include "layout/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "base/error.h"

namespace shardsmith {
namespace {

PartitionCosts equal_blocks(int n, double embedding = 0, double head = 0) {
  return {embedding, std::vector<double>(static_cast<size_t>(n), 1.0), head};
}

TEST(Partition, TenLayersOnThreeStages) {
  const Partition p = make_partition(equal_blocks(10), 3);
  EXPECT_EQ(p.first.front(), 0);
  EXPECT_EQ(p.first.back(), 10);
  EXPECT_DOUBLE_EQ(balance(equal_blocks(10), p), 10.0 / 3 / 4);
}

TEST(Partition, AHeavyHeadGetsFewerBlocks) {
  const Partition p = make_partition(equal_blocks(12, 0, 4), 2);
  EXPECT_EQ(p.first, (std::vector<int>{0, 8, 12}));
  EXPECT_DOUBLE_EQ(balance(equal_blocks(12, 0, 4), p), 1.0);
}

TEST(Partition, AmongEqualsTheEvenestIsChosen) {
  // Whatever the other stages do, block 0 costs 9: they must still share the rest evenly.
  const Partition p = make_partition({0, {9, 1, 1, 1, 1, 1, 1}, 0}, 3);
  EXPECT_EQ(p.first, (std::vector<int>{0, 1, 4, 7}));
}

TEST(Partition, EachLayerLandsOnceForAnyNumbers) {
  for (int layers = 1; layers <= 30; ++layers) {
    for (int stages = 1; stages <= layers; ++stages) {
      const Partition p = make_partition(equal_blocks(layers, 2.5, 1.5), stages);
      ASSERT_EQ(p.stages(), stages);
      EXPECT_EQ(p.first[0], 0);
      EXPECT_EQ(p.first.back(), layers);
      for (int s = 0; s < stages; ++s) EXPECT_LT(p.first[static_cast<size_t>(s)], p.first[static_cast<size_t>(s) + 1]);
    }
  }
}

// Against every possible partition.
TEST(Partition, IsTheBestThereIs) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> cost(0, 10);
  for (int trial = 0; trial < 60; ++trial) {
    const int layers = 1 + trial % 8, stages = 1 + static_cast<int>(random() % static_cast<unsigned>(layers));
    PartitionCosts costs{cost(random), {}, cost(random)};
    for (int i = 0; i < layers; ++i) costs.blocks.push_back(cost(random));
    std::pair<double, double> best{1e300, 1e300};
    const auto score = [&](const std::vector<int>& first) {
      double most = 0, squares = 0;
      for (int s = 0; s < stages; ++s) {
        double sum = (s == 0 ? costs.embedding : 0) + (s == stages - 1 ? costs.head : 0);
        for (int b = first[static_cast<size_t>(s)]; b < first[static_cast<size_t>(s) + 1]; ++b)
          sum += costs.blocks[static_cast<size_t>(b)];
        most = std::max(most, sum), squares += sum * sum;
      }
      return std::pair{most, squares};
    };
    std::vector<int> first(static_cast<size_t>(stages) + 1, 0);
    first.back() = layers;
    std::function<void(int)> all = [&](int s) {
      if (s == stages) return void(best = std::min(best, score(first)));
      for (int b = first[static_cast<size_t>(s) - 1] + 1; b <= layers - (stages - s); ++b)
        first[static_cast<size_t>(s)] = b, all(s + 1);
    };
    all(1);
    const auto found = score(make_partition(costs, stages).first);
    EXPECT_NEAR(found.first, best.first, 1e-9);
    EXPECT_NEAR(found.second, best.second, 1e-6);
  }
}

TEST(Partition, TooFewLayersNameBothNumbers) {
  try {
    make_partition(equal_blocks(3), 4);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
    EXPECT_NE(std::string(e.what()).find("3 layers"), std::string::npos);
    EXPECT_NE(std::string(e.what()).find("4 pipeline stages"), std::string::npos);
  }
  EXPECT_THROW(make_partition(equal_blocks(3), 0), Error);
  EXPECT_THROW(make_partition({-1, {1, 1}, 0}, 1), Error);
}

}  // namespace
}  // namespace shardsmith
