// Ranks of one machine that read the same parts of files: who reads what through the page cache, and in which order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "counting_storage.h"
#include "storage/shared_reads.h"
#include "storage/transfer.h"
#include "test_files.h"

namespace shardsmith {
namespace {

constexpr uint64_t kBlock = SharedReads::kBlock, kPart = SharedReads::kPart;

Index files_of(std::vector<uint64_t> sizes) {
  Index index;
  for (uint64_t size : sizes) index.files.push_back({"file" + std::to_string(index.files.size()), size, nullptr});
  return index;
}

Plan reading(std::vector<Read> reads) {
  Plan plan;
  plan.reads = std::move(reads);
  return plan;
}

TEST(SharedReads, AreTheBlocksThatAnotherRankOfTheMachineReadsToo) {
  const Index index = files_of({10 * kBlock, 5 * kBlock + 7});
  const std::string first =
      SharedReads::announce(reading({{0, 0, 3 * kBlock, 0, {}}, {1, 5 * kBlock, 7, 0, {}}}), index, "here");
  const std::string second = SharedReads::announce(
      reading({{0, 2 * kBlock + 5, kBlock, 0, {}}, {1, 5 * kBlock + 6, 1, 0, {}}}), index, "here");
  const std::string elsewhere = SharedReads::announce(reading({{0, 0, 10 * kBlock, 0, {}}}), index, "there");
  const std::string others =
      SharedReads::announce(reading({{0, 0, 3 * kBlock, 0, {}}}), files_of({10 * kBlock, 4}), "here");
  const SharedReads shared({first, elsewhere, second, others}, 0);
  EXPECT_FALSE(shared.is_shared(0, 0, 2 * kBlock));
  EXPECT_TRUE(shared.is_shared(0, 2 * kBlock, 2 * kBlock + 1));
  EXPECT_TRUE(shared.is_shared(0, 0, 3 * kBlock));
  EXPECT_FALSE(shared.is_shared(0, 3 * kBlock, 10 * kBlock)) << "only the other one reads it";
  EXPECT_TRUE(shared.is_shared(1, 5 * kBlock, 5 * kBlock + 7));
  EXPECT_FALSE(shared.is_shared(1, 0, 5 * kBlock));
  EXPECT_FALSE(shared.is_shared(2, 0, 1));
  const SharedReads alone({first, elsewhere, second, others}, 1);
  EXPECT_FALSE(alone.is_shared(0, 0, 10 * kBlock)) << "nobody else is on that machine";
}

TEST(SharedReads, RanksBeginWithDifferentPartsAndAllComeToAll) {
  constexpr uint64_t kParts = 7;
  const Index index = files_of({kParts * kPart});
  const std::string all = SharedReads::announce(reading({{0, 0, kParts * kPart, 0, {}}}), index, "here");
  const std::string none = SharedReads::announce(reading({}), index, "here");
  std::map<int, std::vector<uint64_t>> parts;  // by rank, in its order
  for (int rank : {0, 2, 3}) {
    const SharedReads shared({all, none, all, all}, rank);
    std::vector<uint64_t> order(kParts * kPart / kBlock);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](uint64_t a, uint64_t b) { return shared.turn(0, a * kBlock) < shared.turn(0, b * kBlock); });
    for (size_t i = 0; i < order.size(); ++i) {
      if (i % (kPart / kBlock) == 0) parts[rank].push_back(order[i] / (kPart / kBlock));
      EXPECT_EQ(order[i] / (kPart / kBlock), parts[rank].back()) << "a part is read in one go";
    }
  }
  EXPECT_EQ(parts[0], (std::vector<uint64_t>{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(parts[2], (std::vector<uint64_t>{1, 2, 0, 4, 5, 3, 6}));
  EXPECT_EQ(parts[3], (std::vector<uint64_t>{2, 0, 1, 5, 3, 4, 6}));
}

TEST(SharedReads, WhatIsNoAnnouncementIsAnError) {
  const std::string good = SharedReads::announce(reading({{0, 0, 5, 0, {}}}), files_of({5}), "here");
  for (const std::string& bad :
       {std::string(), std::string("here"), std::string("here\nx"), good.substr(0, good.size() - 1)})
    EXPECT_THROW(SharedReads({bad, good}, 1), Error) << bad;
  EXPECT_THROW(SharedReads({good}, 1), Error);
}

// A matrix whose columns two ranks halve, so that both read all of it, between two vectors that one rank alone has.
TEST(SharedReads, ATransferGoesThroughTheCacheForThemAndAroundItForTheRest) {
  constexpr int64_t kRows = 3000, kColumns = 1024, kVector = 4 << 20;
  TestFolder folder;
  const std::string path = folder / "file";
  std::vector<uint32_t> values(kVector + kRows * kColumns + kVector);
  std::iota(values.begin(), values.end(), 0u);
  put_file(path, {reinterpret_cast<const char*>(values.data()), values.size() * 4});
  Index index = files_of({values.size() * 4});
  index.files[0].path = path;
  const auto at = [](int64_t element) { return static_cast<uint64_t>(element) * 4; };
  index.tensors = {
      {"first", Dtype::kI32, {kVector}, {{{{0}, {kVector}}, 0, 0, {1}}}},
      {"matrix", Dtype::kI32, {kRows, kColumns}, {{{{0, 0}, {kRows, kColumns}}, 0, at(kVector), {kColumns, 1}}}},
      {"second", Dtype::kI32, {kVector}, {{{{0}, {kVector}}, 0, at(kVector + kRows * kColumns), {1}}}}};
  index.reindex();

  constexpr int64_t kHalf = kColumns / 2;
  std::vector<std::vector<uint32_t>> matrices(2, std::vector<uint32_t>(kRows * kHalf)),
      vectors(2, std::vector<uint32_t>(kVector));
  std::vector<Plan> plans;
  for (int64_t rank = 0; rank < 2; ++rank) {
    Target target;
    target.wants = {{"matrix", Dtype::kI32, {kRows, kColumns}, {{0, rank * kHalf}, {kRows, kHalf}}, 0, 0, {kHalf, 1}},
                    {rank ? "second" : "first", Dtype::kI32, {kVector}, {{0}, {kVector}}, 1, 0, {1}}};
    plans.push_back(make_plan(index, target));
  }
  const std::vector<std::string> told{SharedReads::announce(plans[0], index, "here"),
                                      SharedReads::announce(plans[1], index, "here")};
  std::vector<CountingStorage> storages(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      const SharedReads shared(told, rank);
      TransferOptions options;
      options.shared = &shared;
      const std::vector<Destination> destinations{{std::as_writable_bytes(std::span(matrices[rank]))},
                                                  {std::as_writable_bytes(std::span(vectors[rank]))}};
      execute(plans[rank], index, destinations, storages[rank], options);
    });
  for (std::thread& rank : ranks) rank.join();
  for (int64_t rank = 0; rank < 2; ++rank) {
    bool good = true;
    for (int64_t i = 0; i < kRows * kHalf; ++i)
      good &= matrices[rank][i] == kVector + i / kHalf * kColumns + rank * kHalf + i % kHalf;
    const int64_t begin = rank ? kVector + kRows * kColumns : 0;
    for (int64_t i = 0; i < kVector; ++i) good &= vectors[rank][i] == begin + i;
    EXPECT_TRUE(good) << "rank " << rank;
    // At the ends of the matrix blocks belong to both.
    EXPECT_GE(storages[rank].buffered, at(kRows * kHalf));
    EXPECT_LE(storages[rank].buffered, at(kRows * kColumns) + (20 << 20));
    EXPECT_GE(storages[rank].direct, at(kVector) / 2);
  }
}

}  // namespace
}  // namespace shardsmith
