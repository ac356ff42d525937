#include "pipeline/schedule.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <thread>

#include "base/error.h"
#include "pipeline_simulator.h"

namespace shardsmith::test {
namespace {

using Kind = Task::Kind;

std::vector<std::vector<Task>> orders_of(ScheduleKind kind, int stages, int microbatches, int active) {
  std::vector<std::vector<Task>> orders;
  for (int s = 0; s < stages; ++s) orders.push_back(training_order(kind, s, stages, microbatches, active));
  return orders;
}

void for_all_schedules(const std::function<void(ScheduleKind, int stages, int microbatches, int active)>& check) {
  for (const ScheduleKind kind : {ScheduleKind::kInterleaved, ScheduleKind::kSimple})
    for (int stages = 1; stages <= 8; ++stages)
      for (int m = 1; m <= 8; ++m)
        for (int active = 1; active <= 8; ++active) {
          SCOPED_TRACE(testing::Message() << (kind == ScheduleKind::kSimple ? "simple, " : "interleaved, ") << stages
                                          << " stages, " << m << " microbatches, " << active << " active");
          check(kind, stages, m, active);
        }
}

TEST(Schedule, EveryMicrobatchGoesForwardThenBackwardOnce) {
  for_all_schedules([](ScheduleKind kind, int stages, int m, int active) {
    for (const std::vector<Task>& order : orders_of(kind, stages, m, active)) {
      std::set<int> forward, backward;
      for (const Task& task : order) {
        if (task.kind == Kind::kForward) {
          EXPECT_EQ(static_cast<size_t>(task.microbatch), forward.size()) << "forwards ascend";
          EXPECT_TRUE(forward.insert(task.microbatch).second);
        } else {
          EXPECT_TRUE(forward.contains(task.microbatch));
          EXPECT_EQ(static_cast<size_t>(task.microbatch), backward.size()) << "backwards ascend";
          EXPECT_TRUE(backward.insert(task.microbatch).second);
        }
      }
      EXPECT_EQ(forward.size(), static_cast<size_t>(m));
      EXPECT_EQ(backward.size(), static_cast<size_t>(m));
    }
  });
}

// Whether sends never wait or, over a transport without buffers, only few may be unreceived.
TEST(Schedule, NoStageWaitsForEver) {
  for_all_schedules([](ScheduleKind kind, int stages, int m, int active) {
    const auto orders = orders_of(kind, stages, m, active);
    for (const std::optional<size_t> in_flight : {std::optional<size_t>(), {2}, {1}})
      EXPECT_TRUE(simulate(orders, in_flight).finished) << "sends in flight: " << (in_flight ? *in_flight : 99);
  });
}

// As where ranks of the last stage compute logits together (stage.cc): forwards first on all but the last stage.
TEST(Schedule, ALastStageThatAlternatesFitsStagesThatDoNot) {
  for (int stages = 2; stages <= 8; ++stages)
    for (int m = 1; m <= 40; ++m) {
      auto orders = orders_of(ScheduleKind::kSimple, stages, m, default_active_microbatches(stages, m));
      orders.back() = training_order(ScheduleKind::kInterleaved, stages - 1, stages, m, m);
      EXPECT_TRUE(simulate(orders, 2 * static_cast<size_t>(stages + 1)).finished) << stages << " stages, " << m;
    }
}

TEST(Schedule, AtMostTheActiveMicrobatchesHoldActivations) {
  for_all_schedules([](ScheduleKind kind, int stages, int m, int active) {
    const Simulated result = simulate(orders_of(kind, stages, m, active), std::nullopt);
    for (int s = 0; s < stages; ++s) {
      const int most = kind == ScheduleKind::kSimple ? std::min(m, active) : std::min({m, active, stages - s});
      EXPECT_EQ(result.most_held[static_cast<size_t>(s)], most) << "stage " << s;
    }
  });
}

// With enough active microbatches the bubble of both is p - 1 forwards and p - 1 backwards (Narayanan et al.
// 2021, 2.2).
TEST(Schedule, TheBubbleIsAsShortAsItCanBe) {
  for_all_schedules([](ScheduleKind kind, int stages, int m, int active) {
    const Simulated result = simulate(orders_of(kind, stages, m, active), std::nullopt);
    const int best = 2 * m + 2 * (stages - 1);
    if (active >= (kind == ScheduleKind::kSimple ? m : std::min(m, stages))) {
      EXPECT_EQ(result.slots, best);
    } else {
      EXPECT_GE(result.slots, best);
    }
    // One at a time: every microbatch goes down and up the whole pipeline.
    if (active == 1) {
      EXPECT_EQ(result.slots, 2 * stages * m);
    }
  });
}

TEST(Schedule, TheSimulatorSeesAnOrderThatDeadlocks) {
  // Stage 0 wants microbatch 0's gradient before it forwards microbatch 1, stage 1 forwards both first.
  const std::vector<std::vector<Task>> orders{
      {{Kind::kForward, 0}, {Kind::kBackward, 0}, {Kind::kForward, 1}, {Kind::kBackward, 1}},
      {{Kind::kForward, 0}, {Kind::kForward, 1}, {Kind::kBackward, 0}, {Kind::kBackward, 1}}};
  EXPECT_FALSE(simulate(orders, std::nullopt).finished);
}

TEST(Schedule, WordsAndDefaults) {
  EXPECT_EQ(schedule_kind("interleaved"), ScheduleKind::kInterleaved);
  EXPECT_EQ(schedule_kind("simple"), ScheduleKind::kSimple);
  EXPECT_THROW(schedule_kind("_only_forward"), Error);
  EXPECT_EQ(default_active_microbatches(2, 8), 4);
  EXPECT_EQ(default_active_microbatches(4, 3), 3);
  for (const auto& [stage, m, active] : {std::tuple{2, 1, 1}, {-1, 1, 1}, {0, 0, 1}, {0, 1, 0}})
    EXPECT_THROW(training_order(ScheduleKind::kSimple, stage, 2, m, active), Error);
  // Far above the microbatches: no overflow.
  EXPECT_EQ(training_order(ScheduleKind::kSimple, 0, 2, 3, std::numeric_limits<int>::max()).size(), 6u);
}

TEST(Turns, ThreadsRunInTheScheduleOrder) {
  constexpr int kMicrobatches = 6;
  Turns turns;
  const std::vector<Task> order = training_order(ScheduleKind::kInterleaved, 0, 3, kMicrobatches, kMicrobatches);
  turns.begin(order);
  std::vector<Task> seen;  // guarded by the turns themselves
  std::vector<std::thread> threads;
  for (int mb = kMicrobatches - 1; mb >= 0; --mb)
    threads.emplace_back([&, mb] {
      for (const Kind kind : {Kind::kForward, Kind::kBackward}) {
        turns.enter({kind, mb});
        seen.push_back({kind, mb});
        turns.leave();
      }
      turns.finish(mb);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(seen, order);
  EXPECT_NO_THROW(turns.require_done());
}

TEST(Turns, AFunctionWithoutBackwardIsPassedOver) {
  Turns turns;
  turns.begin(training_order(ScheduleKind::kInterleaved, 0, 1, 2, 2));  // F0 B0 F1 B1
  turns.enter({Kind::kForward, 0});
  turns.leave();
  turns.finish(0);
  turns.enter({Kind::kForward, 1});
  turns.leave();
  EXPECT_THROW(turns.require_done(), Error);
  turns.finish(1);
  EXPECT_NO_THROW(turns.require_done());
}

TEST(Turns, AbortWakesWaitersWithItsText) {
  Turns turns;
  turns.begin(training_order(ScheduleKind::kInterleaved, 0, 1, 2, 2));
  std::string text;
  std::thread waiter([&] {
    try {
      turns.enter({Kind::kForward, 1});
    } catch (const Error& e) {
      text = e.what();
    }
  });
  turns.abort("microbatch 0 failed");
  waiter.join();
  EXPECT_EQ(text, "microbatch 0 failed");
}

TEST(Turns, CallingTheModelTwiceIsAnError) {
  Turns turns;
  turns.begin(training_order(ScheduleKind::kInterleaved, 0, 1, 1, 1));
  turns.enter({Kind::kForward, 0});
  turns.leave();
  EXPECT_THROW(turns.enter({Kind::kForward, 0}), Error);
}

// As a stage uses them: a thread a microbatch, steps one after another, some functions without a backward, and in some
// steps an abort in the middle. One task at a time, in the order of the schedule, and nobody is left behind.
TEST(Turns, ManyStepsOfThreadsWithAborts) {
  constexpr int kMicrobatches = 8;
  Turns turns;
  std::mt19937 random(9);
  for (int step = 0; step < 150; ++step) {
    const std::vector<Task> order = training_order(step % 2 ? ScheduleKind::kSimple : ScheduleKind::kInterleaved, 0,
                                                   1 + step % 5, kMicrobatches, 1 + step % kMicrobatches);
    const bool aborts = step % 3 == 0;
    const size_t abort_at = random() % order.size();
    const int without_backward = step % 4 == 1 ? static_cast<int>(random() % kMicrobatches) : -1;
    turns.begin(order);
    std::atomic<int> inside{0}, aborted{0};
    std::vector<Task> seen;  // guarded by the turns
    std::vector<std::thread> threads;
    for (int mb = 0; mb < kMicrobatches; ++mb)
      threads.emplace_back([&, mb] {
        try {
          for (const Kind kind : {Kind::kForward, Kind::kBackward}) {
            if (kind == Kind::kBackward && mb == without_backward) break;
            turns.enter({kind, mb});
            EXPECT_EQ(inside.fetch_add(1), 0) << "one at a time";
            seen.push_back({kind, mb});
            const bool stop = aborts && seen.size() == abort_at + 1;
            if (stop) turns.abort("stopped at task " + std::to_string(abort_at));
            inside.fetch_sub(1);
            if (stop) throw Error(ErrorKind::kIo, "own");
            turns.leave();
          }
          turns.finish(mb);
        } catch (const Error& e) {
          ++aborted;
          if (e.kind() == ErrorKind::kPeer) {
            EXPECT_EQ(e.what(), "stopped at task " + std::to_string(abort_at));
          }
        }
      });
    for (std::thread& thread : threads) thread.join();
    std::vector<Task> expected = order;
    std::erase(expected, Task{Kind::kBackward, without_backward});
    if (aborts && abort_at < expected.size()) {
      EXPECT_GE(aborted, 1);
      EXPECT_TRUE(turns.aborted());
      EXPECT_THROW(turns.require_done(), Error);
      expected.resize(abort_at + 1);
    } else {
      EXPECT_EQ(aborted, 0);
      EXPECT_NO_THROW(turns.require_done());
    }
    EXPECT_EQ(seen, expected) << "step " << step;
  }
}

}  // namespace
}  // namespace shardsmith::test
