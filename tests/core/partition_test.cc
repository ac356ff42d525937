#include "layout/partition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
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

// 1,000 layers of uneven cost on any number of stages.
TEST(Partition, AThousandLayersTakeNoTime) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> cost(0.5, 2);
  PartitionCosts costs{30, {}, 40};
  for (int i = 0; i < 1000; ++i) costs.blocks.push_back(i % 7 ? cost(random) : 0);
  const auto begin = std::chrono::steady_clock::now();
  for (const int stages : {1, 2, 16, 64, 333, 500, 1000}) EXPECT_EQ(make_partition(costs, stages).stages(), stages);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("seven partitions of 1,000 layers: %.0f ms\n", seconds * 1000);
  // Ten times what it takes, for sanitizers and busy machines.
  EXPECT_LT(seconds, 10);
}

// The parameters of a GPT-2 with four layers, in the order of its module tree.
const std::vector<PlacedName> kGpt2{{"transformer.wte.weight", -1},     {"transformer.wpe.weight", -1},
                                    {"transformer.h.0.ln_1.weight", 0}, {"transformer.h.0.mlp.c_fc.weight", 0},
                                    {"transformer.h.1.ln_1.weight", 1}, {"transformer.h.1.mlp.c_fc.weight", 1},
                                    {"transformer.h.2.ln_1.weight", 2}, {"transformer.h.2.mlp.c_fc.weight", 2},
                                    {"transformer.h.3.ln_1.weight", 3}, {"transformer.h.3.mlp.c_fc.weight", 3},
                                    {"transformer.ln_f.weight", 4},     {"lm_head.weight", 4}};

std::vector<int> wished(const std::vector<PartitionWish>& wishes, int stages = 2, int default_stage = 0) {
  return manual_partition(kGpt2, 4, stages, wishes, default_stage).first;
}

TEST(ManualPartition, WishesForLayersBecomeRunsOfLayers) {
  EXPECT_EQ(wished({{"transformer.h.3", 1}}), (std::vector<int>{0, 3, 4}));
  EXPECT_EQ(wished({{"transformer.h.0", 0}}, 2, 1), (std::vector<int>{0, 1, 4}));
  EXPECT_EQ(wished({{"transformer.h.1", 1}, {"transformer.h.2", 1}, {"transformer.h.3", 2}}, 3),
            (std::vector<int>{0, 1, 3, 4}));
  EXPECT_EQ(wished({}, 1), (std::vector<int>{0, 4}));
}

TEST(ManualPartition, TheInnermostWishCounts) {
  EXPECT_EQ(wished({{"transformer.h", 1}, {"transformer.h.0", 0}}), (std::vector<int>{0, 1, 4}));
  EXPECT_EQ(wished({{"transformer.h.0", 0}, {"transformer.h", 1}}), (std::vector<int>{0, 1, 4}))
      << "whatever the order";
  EXPECT_EQ(wished({{"transformer.h.2", 1}, {"transformer.h.3", 0}, {"transformer.h.3", 1}}),
            (std::vector<int>{0, 2, 4}))
      << "of one module the last";
  // A name is no prefix of another's: h.1 is not around h.10, nor transformer.h around transformer.head.
  EXPECT_EQ(wished({{"transformer.h.", 0}, {"transformer.h.3.ln", 0}, {"transformer.h.3", 1}}),
            (std::vector<int>{0, 3, 4}));
}

TEST(ManualPartition, EndsMayBePlacedWhereTheyBelong) {
  EXPECT_EQ(wished({{"transformer.wte", 0}, {"lm_head", 1}, {"transformer.ln_f", 1}, {"transformer.h.3", 1}}),
            (std::vector<int>{0, 3, 4}));
}

TEST(ManualPartition, WhatCannotBeIsNamed) {
  const auto refusal = [](const std::vector<PartitionWish>& wishes, int stages = 2, int default_stage = 0) {
    try {
      wished(wishes, stages, default_stage);
      return std::string("nothing was thrown");
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
      return std::string(e.what());
    }
  };
  using testing::HasSubstr;
  EXPECT_THAT(refusal({{"transformer.h.1", 2}}), HasSubstr("transformer.h.1 is put on stage 2"));
  EXPECT_THAT(refusal({{"transformer.h.1", 2}}), HasSubstr("0 to 1"));
  EXPECT_THAT(refusal({{"transformer.h.1", -1}}), HasSubstr("stage -1"));
  EXPECT_THAT(refusal({}, 2, 2), HasSubstr("default_partition"));
  EXPECT_THAT(refusal({{"transformer.h.1", 1}}),
              HasSubstr("layer 2 (transformer.h.2.ln_1.weight) is put on stage 0, layer 1"));
  EXPECT_THAT(refusal({}), HasSubstr("stage 1 of 2 gets no layer"));
  EXPECT_THAT(refusal({}, 2, 1), HasSubstr("stage 0 of 2 gets no layer"));
  EXPECT_THAT(refusal({{"transformer.h.3", 2}}, 3), HasSubstr("stage 1 of 3 gets no layer"));
  EXPECT_THAT(refusal({{"transformer.h.3.mlp", 1}}), HasSubstr("layer 3 is torn apart: transformer.h.3.ln_1.weight"));
  EXPECT_THAT(refusal({{"transformer.wpe", 1}, {"transformer.h.3", 1}}),
              HasSubstr("transformer.wpe.weight is put on stage 1"));
  EXPECT_THAT(refusal({{"lm_head", 0}, {"transformer.h.3", 1}}), HasSubstr("the last stage, 1"));
  EXPECT_THAT(refusal({{"transformer", 0}, {"transformer.h.3", 1}}), HasSubstr("transformer.ln_f.weight"));
  EXPECT_THAT(refusal({}, 5), HasSubstr("4 layers"));
}

TEST(PartitionDecision, ComesBackFromItsValue) {
  const Partition partition{{0, 1, 3, 4}};
  const Value value = parse_json(to_json(partition_value(partition)), "test");
  EXPECT_EQ(partition_from(value, 4, 3, "p.json"), partition);
  EXPECT_THROW(partition_from(value, 4, 2, "p.json"), Error);
  EXPECT_THROW(partition_from(value, 5, 3, "p.json"), Error);
}

TEST(PartitionDecision, NonsenseIsNamedWithItsFile) {
  for (const char* text :
       {"[]", "{}", R"({"layers": 4, "stages": 2})", R"({"layers": 4, "stages": 2, "partition": [0, 4]})",
        R"({"layers": 4, "stages": 2, "partition": [0, 0, 4]})",
        R"({"layers": 4, "stages": 2, "partition": [0, 5, 4]})",
        R"({"layers": 4, "stages": 2, "partition": [1, 2, 4]})",
        R"({"layers": 4, "stages": 2, "partition": [0, 2, 3]})",
        R"({"layers": 4, "stages": 2, "partition": [0, "2", 4]})",
        R"({"layers": 4, "stages": 2, "partition": [0, 1099511627776, 4]})"}) {
    try {
      partition_from(parse_json(text, "test"), 4, 2, "p.json");
      ADD_FAILURE() << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kCorrupt) << text;
      EXPECT_EQ(std::string(e.what()).find("p.json: "), 0u) << e.what();
    }
  }
}

}  // namespace
}  // namespace shardsmith
