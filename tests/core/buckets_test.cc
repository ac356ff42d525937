#include "optim/buckets.h"

#include <gtest/gtest.h>

#include <random>

namespace shardsmith {
namespace {

constexpr int64_t kNoCap = int64_t{1} << 60;

BucketParameter matrix(int64_t rows, int64_t columns, int place) {
  return {.rows = rows, .row_elements = columns, .element_size = 4, .place = place};
}

TEST(Buckets, FollowTheBackwardAndAreFilledToTheCap) {
  const std::vector<BucketParameter> parameters{matrix(100, 1, -1), matrix(10, 1, 0), matrix(20, 1, 0),
                                                matrix(30, 1, 1), matrix(5, 1, 2)};
  const std::vector<Bucket> buckets = make_buckets(parameters, 60 * 4, 1);
  ASSERT_EQ(buckets.size(), 3u);
  EXPECT_EQ(buckets[0].parameters, (std::vector<size_t>{4, 3, 1}));
  EXPECT_EQ(buckets[0].place, 0);  // its last parameter's
  EXPECT_EQ(buckets[1].parameters, (std::vector<size_t>{2}));
  EXPECT_EQ(buckets[2].parameters, (std::vector<size_t>{0}));
  EXPECT_EQ(buckets[2].place, -1);
}

TEST(Buckets, KeepDtypesApartAndTheLonelyLast) {
  std::vector<BucketParameter> parameters{matrix(1, 1, 0), matrix(1, 1, 0), matrix(1, 1, 0), matrix(1, 1, 3)};
  parameters[1].dtype = 1;
  parameters[3].alone = true;
  const std::vector<Bucket> buckets = make_buckets(parameters, kNoCap, 1);
  ASSERT_EQ(buckets.size(), 4u);
  EXPECT_EQ(buckets[3].parameters, (std::vector<size_t>{3}));
  EXPECT_EQ(buckets[3].place, Bucket::kNeverEarly);
}

// Each row of each parameter once, in order, cut between units, nobody more than a unit away from an equal share.
TEST(Buckets, SharesCoverEveryRowOnceAndAreBalanced) {
  std::mt19937 random(7);
  for (int round = 0; round < 400; ++round) {
    std::vector<BucketParameter> parameters;
    int64_t largest_unit = 0;
    const int count = 1 + static_cast<int>(random() % 12), ranks = 1 + static_cast<int>(random() % 9);
    for (int i = 0; i < count; ++i) {
      BucketParameter p = matrix(0, 1 + random() % 40, static_cast<int>(random() % 4) - 1);
      p.unit = 1 + random() % 3;
      p.rows = p.unit * static_cast<int64_t>(random() % 50);
      largest_unit = std::max(largest_unit, p.unit * p.row_elements);
      parameters.push_back(p);
    }
    std::vector<int64_t> next(parameters.size(), 0);
    for (const Bucket& bucket : make_buckets(parameters, 4 * 300, ranks)) {
      ASSERT_EQ(bucket.shares.size(), static_cast<size_t>(ranks));
      int64_t total = 0;
      for (const size_t i : bucket.parameters) total += parameters[i].rows * parameters[i].row_elements;
      for (const auto& share : bucket.shares) {
        int64_t elements = 0;
        for (const RowRange& range : share) {
          const BucketParameter& p = parameters[range.parameter];
          EXPECT_EQ(range.begin, next[range.parameter]);
          EXPECT_GT(range.end, range.begin);
          EXPECT_EQ(range.begin % p.unit, 0);
          EXPECT_EQ(range.end % p.unit, 0);
          next[range.parameter] = range.end;
          elements += (range.end - range.begin) * p.row_elements;
        }
        EXPECT_LE(std::abs(elements - total / ranks), largest_unit + 1);
      }
    }
    for (size_t i = 0; i < parameters.size(); ++i) EXPECT_EQ(next[i], parameters[i].rows);
  }
}

// What is sent together is small, and all that is sent is each share, in its order.
TEST(Transfers, CutLargeBucketsBetweenRows) {
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    std::vector<BucketParameter> parameters;
    for (int i = 0; i < 5; ++i) parameters.push_back(matrix(random() % 200, 1 + random() % 30, i));
    const int ranks = 1 + static_cast<int>(random() % 4);
    const int64_t cap = 4 * (60 + static_cast<int64_t>(random() % 500));
    const std::vector<Bucket> buckets = make_buckets(parameters, cap, ranks);
    std::vector<std::vector<std::vector<RowRange>>> sent(buckets.size(), std::vector<std::vector<RowRange>>(ranks));
    size_t last = 0;
    for (const Transfer& transfer : make_transfers(buckets, parameters, cap)) {
      EXPECT_GE(transfer.bucket, last);
      last = transfer.bucket;
      EXPECT_LE(transfer.part_elements, std::max<int64_t>(cap / 4 / ranks, 30));
      ASSERT_EQ(transfer.parts.size(), static_cast<size_t>(ranks));
      int64_t largest = 0;
      for (int r = 0; r < ranks; ++r) {
        int64_t elements = 0;
        for (const RowRange& range : transfer.parts[r]) {
          elements += (range.end - range.begin) * parameters[range.parameter].row_elements;
          auto& before = sent[transfer.bucket][r];
          if (!before.empty() && before.back().parameter == range.parameter && before.back().end == range.begin)
            before.back().end = range.end;
          else
            before.push_back(range);
        }
        largest = std::max(largest, elements);
      }
      EXPECT_EQ(transfer.part_elements, largest);
    }
    for (size_t b = 0; b < buckets.size(); ++b) EXPECT_EQ(sent[b], buckets[b].shares);
  }
}

}  // namespace
}  // namespace shardsmith
