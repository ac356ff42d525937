#include "pipeline/schedule.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "base/error.h"

namespace shardsmith {
namespace {

using Kind = Task::Kind;

TEST(Schedule, EveryMicrbatchGoesForwardThenBackwardOnce) {
  for (int stages = 1; stages <= 6; ++stages)
    for (int stage = 0; stage < stages; ++stage)
      for (int m = 1; m <= 9; ++m) {
        std::set<int> forward, backward;
        size_t alive = 0;
        for (const Task& task : one_forward_one_backward(stage, stages, m)) {
          if (task.kind == Kind::kForward) {
            EXPECT_TRUE(forward.insert(task.microbatch).second);
          } else {
            EXPECT_TRUE(forward.contains(task.microbatch));
            EXPECT_TRUE(backward.insert(task.microbatch).second);
          }
          alive = std::max(alive, forward.size() - backward.size());
        }
        EXPECT_EQ(forward.size(), static_cast<size_t>(m));
        EXPECT_EQ(backward.size(), static_cast<size_t>(m));
        EXPECT_LE(alive, static_cast<size_t>(stages - stage)) << "stage " << stage << " of " << stages;
      }
}

// Runs all stages' schedules against each other with messages that take no time: it ends only if no stage waits for
// ever.
TEST(Schedule, StagesNeverWaitForEachOtherForEver) {
  for (int stages = 1; stages <= 6; ++stages)
    for (int m = 1; m <= 9; ++m) {
      std::vector<std::vector<Task>> orders;
      for (int s = 0; s < stages; ++s) orders.push_back(one_forward_one_backward(s, stages, m));
      std::vector<size_t> next(static_cast<size_t>(stages));
      std::set<std::pair<int, int>> activations, gradients;  // (stage, microbatch) that have arrived
      bool moved = true;
      while (moved) {
        moved = false;
        for (int s = 0; s < stages; ++s) {
          const auto i = static_cast<size_t>(s);
          if (next[i] == orders[i].size()) continue;
          const Task task = orders[i][next[i]];
          const bool ready = task.kind == Kind::kForward ? s == 0 || activations.contains({s, task.microbatch})
                                                         : s == stages - 1 || gradients.contains({s, task.microbatch});
          if (!ready) continue;
          if (task.kind == Kind::kForward)
            activations.insert({s + 1, task.microbatch});
          else
            gradients.insert({s - 1, task.microbatch});
          ++next[i];
          moved = true;
        }
      }
      for (int s = 0; s < stages; ++s)
        EXPECT_EQ(next[static_cast<size_t>(s)], orders[static_cast<size_t>(s)].size()) << stages << " stages, " << m;
    }
}

TEST(Turns, ThreadsRunInTheScheduleOrder) {
  constexpr int kMicrobatches = 6;
  Turns turns;
  const std::vector<Task> order = one_forward_one_backward(0, 3, kMicrobatches);
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
  turns.begin(one_forward_one_backward(0, 1, 2));  // F0 B0 F1 B1
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
  turns.begin(one_forward_one_backward(0, 1, 2));
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
  turns.begin(one_forward_one_backward(0, 1, 1));
  turns.enter({Kind::kForward, 0});
  turns.leave();
  EXPECT_THROW(turns.enter({Kind::kForward, 0}), Error);
}

}  // namespace
}  // namespace shardsmith
