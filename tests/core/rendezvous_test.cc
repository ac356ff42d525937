// Ranks as threads: messages and collectives by value, and every way in which a rank can fail the others.
#include "comm/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <numeric>
#include <random>
#include <thread>

#include "base/error.h"

namespace shardsmith {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::HasSubstr;
using Numbers = std::vector<uint64_t>;

constexpr int kRanks = 8;

Rendezvous::Deadline in(milliseconds time) { return steady_clock::now() + time; }
constexpr milliseconds kLong{60000};

std::span<std::byte> bytes_of(Numbers& numbers) { return std::as_writable_bytes(std::span(numbers)); }

// What rank `from` sends to rank `to` under a tag: every element its own.
Numbers message(int from, int to, uint64_t tag) {
  Numbers numbers(1 + (tag * 7 + static_cast<uint64_t>(from)) % 50);
  for (size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = (tag << 32) + (static_cast<uint64_t>(from * kRanks + to) << 16) + i;
  return numbers;
}

void sum(std::vector<std::span<std::byte>>& all) {
  Numbers total(all[0].size() / sizeof(uint64_t), 0);
  for (const std::span<std::byte>& bytes : all) {
    Numbers own(total.size());
    std::memcpy(own.data(), bytes.data(), bytes.size());
    for (size_t i = 0; i < total.size(); ++i) total[i] += own[i];
  }
  for (const std::span<std::byte>& bytes : all) std::memcpy(bytes.data(), total.data(), bytes.size());
}

// Runs body(rank) on one thread a rank; what each threw, "" where nothing.
struct Ended {
  std::vector<std::string> texts = std::vector<std::string>(kRanks);
  std::vector<ErrorKind> kinds = std::vector<ErrorKind>(kRanks, ErrorKind::kIo);
  std::vector<int> ranks = std::vector<int>(kRanks, -1);
};
Ended run_ranks(const std::function<void(int)>& body) {
  Ended ended;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank)
    threads.emplace_back([&, rank] {
      const auto r = static_cast<size_t>(rank);
      try {
        body(rank);
      } catch (const Error& e) {
        ended.texts[r] = e.what(), ended.kinds[r] = e.kind(), ended.ranks[r] = e.rank();
      } catch (const std::exception& e) {
        ended.texts[r] = e.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return ended;
}

// One round of everything: messages to all in one random order, from all in another, then a sum.
void exchange(Rendezvous& world, int rank, uint64_t round, std::mt19937& random) {
  std::vector<int> others(kRanks);
  std::iota(others.begin(), others.end(), 0);
  std::shuffle(others.begin(), others.end(), random);
  for (const int to : others) {
    // Two under one tag: they arrive in the order in which they were sent.
    for (const uint64_t tag : {2 * round, 2 * round + 1}) {
      const Numbers sent = message(rank, to, tag);
      world.send(rank, to, round, std::as_bytes(std::span(sent)));
    }
  }
  std::shuffle(others.begin(), others.end(), random);
  for (const int from : others) {
    for (const uint64_t tag : {2 * round, 2 * round + 1}) {
      const Numbers expected = message(from, rank, tag);
      Numbers got(expected.size());
      world.receive(from, rank, round, bytes_of(got), in(kLong));
      ASSERT_EQ(got, expected) << "from " << from << " to " << rank << " in round " << round;
    }
  }
  Numbers own(17, round * 1000 + static_cast<uint64_t>(rank));
  world.collective(rank, bytes_of(own), sum, in(kLong));
  ASSERT_EQ(own, Numbers(17, kRanks * round * 1000 + kRanks * (kRanks - 1) / 2)) << "round " << round;
}

TEST(Rendezvous, MessagesAndSumsArriveByValue) {
  Rendezvous world(kRanks);
  const Ended ended = run_ranks([&](int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (uint64_t round = 0; round < 200; ++round) exchange(world, rank, round, random);
  });
  for (const std::string& text : ended.texts) EXPECT_EQ(text, "");
}

TEST(Rendezvous, EmptyMessagesAndEmptyCollectivesWork) {
  Rendezvous world(kRanks);
  const Ended ended = run_ranks([&](int rank) {
    world.send(rank, (rank + 1) % kRanks, 0, {});
    world.receive((rank + kRanks - 1) % kRanks, rank, 0, {}, in(kLong));
    int calls = 0;
    world.collective(
        rank, {}, [&](auto& all) { EXPECT_EQ(all.size(), static_cast<size_t>(kRanks)), ++calls; }, in(kLong));
  });
  for (const std::string& text : ended.texts) EXPECT_EQ(text, "");
}

// A random rank fails at a random point; whoever gives up because of it says so in turn, as ranks that end do.
TEST(Rendezvous, AFailedRankIsNamedByAllTheOthersInTime) {
  std::mt19937 choice(5);
  for (int trial = 0; trial < 60; ++trial) {
    Rendezvous world(kRanks);
    const int victim = static_cast<int>(choice() % kRanks);
    const uint64_t last = choice() % 6;
    const auto begin = steady_clock::now();
    const Ended ended = run_ranks([&](int rank) {
      std::mt19937 random(static_cast<unsigned>(trial * kRanks + rank));
      try {
        for (uint64_t round = 0; round < 10; ++round) {
          if (rank == victim && round == last) {
            if (trial % 2) world.send(rank, (rank + 1) % kRanks, round, {});  // half of its work is done
            throw std::runtime_error("boom");
          }
          exchange(world, rank, round, random);
        }
      } catch (const std::exception& e) {
        world.fail_rank(rank, e.what());
        throw;
      }
    });
    EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(20)) << "nobody waited for the deadline";
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto r = static_cast<size_t>(rank);
      if (rank == victim) {
        EXPECT_EQ(ended.texts[r], "boom");
        continue;
      }
      // The victim's half-sent message may meet another size first.
      if (ended.kinds[r] == ErrorKind::kInvalidArgument) {
        EXPECT_THAT(ended.texts[r], HasSubstr("rank " + std::to_string(victim) + " sent 0 bytes"));
        continue;
      }
      EXPECT_EQ(ended.kinds[r], ErrorKind::kPeer) << ended.texts[r];
      EXPECT_THAT(ended.texts[r], testing::AnyOf(HasSubstr("rank " + std::to_string(victim) + " failed: boom"),
                                                 HasSubstr("rank " + std::to_string(victim) + " sent 0 bytes")));
    }
  }
}

TEST(Rendezvous, AFailureIsToldBeforeDuringAndAfterTheWait) {
  Rendezvous world(2);
  world.send(1, 0, 1, std::as_bytes(std::span("x", 1)));
  std::thread late([&] {
    std::this_thread::sleep_for(milliseconds(20));
    world.fail_rank(1, "");
  });
  std::byte byte;
  world.receive(1, 0, 1, {&byte, 1}, in(kLong));  // what it had sent still arrives
  for (int i = 0; i < 2; ++i) {
    try {
      world.receive(1, 0, 2, {&byte, 1}, in(kLong));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kPeer);
      EXPECT_EQ(e.rank(), 1);
      EXPECT_STREQ(e.what(), "rank 1 failed: failed");
    }
  }
  late.join();
  EXPECT_THROW(world.collective(
                   0, {&byte, 1}, [](auto&) {}, in(kLong)),
               Error);
}

TEST(Rendezvous, LateRanksAreNamed) {
  Rendezvous world(kRanks);
  const auto begin = steady_clock::now();
  const Ended ended = run_ranks([&](int rank) {
    Numbers own(3, 1);
    if (rank == 3 || rank == 6) return;  // stalled
    if (rank == 0) return world.receive(3, 0, 9, bytes_of(own), in(milliseconds(150)));
    world.collective(rank, bytes_of(own), sum, in(milliseconds(150)));
  });
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(15));
  EXPECT_EQ(ended.kinds[0], ErrorKind::kTimeout);
  EXPECT_THAT(ended.texts[0], HasSubstr("rank 3 did not send to rank 0"));
  for (const size_t r : {1, 2, 4, 5, 7}) {
    EXPECT_EQ(ended.kinds[r], ErrorKind::kTimeout);
    EXPECT_THAT(ended.texts[r], HasSubstr("ranks 0, 3, 6 did not join"));
  }
  // Who leaves takes its bytes along: the next collective is whole again.
  const Ended again = run_ranks([&](int rank) {
    Numbers own(3, 1);
    world.collective(rank, bytes_of(own), sum, in(kLong));
    EXPECT_EQ(own, Numbers(3, kRanks));
  });
  for (const std::string& text : again.texts) EXPECT_EQ(text, "");
}

TEST(Rendezvous, DifferentSizesAreRefusedOnEveryRank) {
  Rendezvous world(kRanks);
  const Ended ended = run_ranks([&](int rank) {
    Numbers own(rank == 5 ? 4 : 3, 1);
    world.collective(rank, bytes_of(own), sum, in(kLong));
  });
  for (size_t r = 0; r < kRanks; ++r) {
    EXPECT_EQ(ended.kinds[r], ErrorKind::kInvalidArgument);
    EXPECT_THAT(ended.texts[r], HasSubstr("rank 5 brings 32 bytes to a collective, rank 0 brings 24"));
  }
  world.send(0, 1, 0, std::as_bytes(std::span("abc", 3)));
  std::byte two[2];
  try {
    world.receive(0, 1, 0, two, in(kLong));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("rank 0 sent 3 bytes where rank 1 expects 2"));
  }
}

TEST(Rendezvous, WhatCombiningThrowsIsEverybodysError) {
  Rendezvous world(kRanks);
  for (int round = 0; round < 20; ++round) {
    const Ended ended = run_ranks([&](int rank) {
      Numbers own(3, 1);
      const auto combine = [&](auto& all) {
        if (round % 2) throw std::runtime_error("no such operation");
        sum(all);
      };
      world.collective(rank, bytes_of(own), combine, in(kLong));
    });
    for (const std::string& text : ended.texts) EXPECT_EQ(text, round % 2 ? "no such operation" : "");
  }
}

}  // namespace
}  // namespace shardsmith
