#include "layout/share.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace shardsmith {
namespace {

TEST(Share, EqualLoadsAreDealtEqually) {
  std::vector<uint64_t> load(3, 0);
  EXPECT_EQ(share_out({{9, {0, 1, 2}}}, load), (std::vector<Share>{{0, 3, 0}, {3, 6, 1}, {6, 9, 2}}));
  EXPECT_EQ(load, (std::vector<uint64_t>{3, 3, 3}));
}

TEST(Share, WhoHasLessGetsMore) {
  std::vector<uint64_t> load{5, 0};
  EXPECT_EQ(share_out({{7, {0, 1}}}, load), (std::vector<Share>{{0, 1, 0}, {1, 7, 1}}));
  EXPECT_EQ(load, (std::vector<uint64_t>{6, 6}));
  load = {9, 0};
  EXPECT_EQ(share_out({{4, {0, 1}}}, load), (std::vector<Share>{{0, 4, 1}}));
}

TEST(Share, NeighboursOfOneRankAreOne) {
  std::vector<uint64_t> load(2, 0);
  EXPECT_EQ(share_out({{2, {1}}, {3, {1}}, {1, {0}}}, load), (std::vector<Share>{{0, 5, 1}, {5, 6, 0}}));
}

TEST(Share, EveryBlockOnceByOneWhoMayAndAsEvenlyAsCanBe) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 500; ++trial) {
    const size_t ranks = 1 + random() % 6;
    std::vector<uint64_t> load(ranks);
    for (uint64_t& one : load) one = random() % 20;
    std::vector<Stretch> stretches;
    uint64_t blocks = 0;
    for (size_t s = 0; s < 1 + random() % 5; ++s) {
      Stretch stretch{random() % 40, {}};
      for (size_t r = 0; r < ranks; ++r)
        if (random() % 2) stretch.ranks.push_back(static_cast<int>(r));
      if (stretch.ranks.empty()) stretch.ranks.push_back(0);
      blocks += stretch.blocks;
      stretches.push_back(stretch);
    }
    const std::vector<uint64_t> before = load;
    const std::vector<Share> shares = share_out(stretches, load);
    uint64_t at = 0;
    std::vector<uint64_t> added(ranks, 0);
    for (const Share& share : shares) {
      ASSERT_EQ(share.begin, at);
      ASSERT_LT(share.begin, share.end);
      at = share.end;
      added[static_cast<size_t>(share.rank)] += share.end - share.begin;
      uint64_t first = 0;
      for (const Stretch& stretch : stretches) {
        const bool touches = stretch.blocks > 0 && share.begin < first + stretch.blocks && first < share.end;
        EXPECT_TRUE(!touches || std::count(stretch.ranks.begin(), stretch.ranks.end(), share.rank));
        first += stretch.blocks;
      }
    }
    ASSERT_EQ(at, blocks);
    for (size_t r = 0; r < ranks; ++r) EXPECT_EQ(load[r], before[r] + added[r]);
    if (stretches.size() != 1) continue;
    // Whoever got something has at most one block more than any other who may.
    for (const int r : stretches[0].ranks)
      for (const int other : stretches[0].ranks)
        EXPECT_TRUE(added[static_cast<size_t>(r)] == 0 ||
                    load[static_cast<size_t>(r)] <= load[static_cast<size_t>(other)] + 1);
  }
}

}  // namespace
}  // namespace shardsmith
