// Four ranks as threads, one of which fails: all the others end in time, and with that rank's error.
#include <gmock/gmock.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/error.h"
#include "comm/store_peers.h"
#include "support.h"

namespace shardsmith::test {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;

constexpr int kRanks = 4;
constexpr int kMicrobatches = 3;
constexpr milliseconds kTimeout{3000};  // how long a rank waits for another
constexpr milliseconds kGrace{6000};    // and asks who is at fault
constexpr double kTimeLimit = 25;       // seconds until all have ended: both, and a busy machine

// What befalls the victim.
enum class Fault {
  kForward,         // its function throws before the model is called
  kInsideForward,   // the model throws
  kBackward,        // its function throws before backward
  kInsideBackward,  // autograd throws
  kReduction,       // it throws when the gradients are about to be reduced
  kOptimizer,       // it throws after the step, while the others begin the next
  kStall,           // it does nothing any more
  kKill,            // its thread ends without a word
};

struct Layout {
  int pp = 1, rdp = 1, tp = 1;
};

struct Ended {
  std::vector<std::string> texts = std::vector<std::string>(kRanks);
  double seconds = 0;
};

struct Worlds {
  std::map<std::vector<int>, ThreadWorld> worlds;
  std::optional<Group> group(const std::vector<int>& members, int rank, const char* name) {
    if (members.size() == 1) return std::nullopt;
    if (!worlds.contains(members)) worlds[members] = make_thread_world(static_cast<int>(members.size()));
    const auto place = static_cast<size_t>(std::find(members.begin(), members.end(), rank) - members.begin());
    return Group(worlds[members].groups[place], name, kTimeout);
  }
};

// Runs `body` on four threads. `running` counts those that have not ended.
using Body = std::function<void(int rank, Stage& stage, Tensors& weights)>;
Ended run_stages(Layout layout, const Body& body, std::atomic<int>& running, bool own_batches = false) {
  const FamilyModel model = family(kTinyLlama);
  const Tensors all = initial_weights(model);
  const Mesh mesh(kRanks, layout.pp, layout.tp);
  const Partition partition = make_partition(model_costs(model, 0.5, 16).costs, layout.pp);
  Worlds pipelines, replicas, slices;
  std::vector<StageOptions> options(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    StageOptions& own = options[static_cast<size_t>(rank)];
    own.partition = partition;
    own.stage = mesh.coordinates(rank).pp;
    own.pipeline = pipelines.group(mesh.pp_group(rank), rank, "pipeline group");
    own.replicas = replicas.group(mesh.rdp_group(rank), rank, "data-parallel group");
    own.tensor = slices.group(mesh.tp_group(rank), rank, "tensor-parallel group");
    own.prescaled_batch = !own_batches;
  }
  auto store = c10::make_intrusive<c10d::HashStore>();
  running = kRanks;
  Ended ended;
  const auto begin = std::chrono::steady_clock::now();
  run_ranks(kRanks, [&](int rank) {
    const Coordinates at = mesh.coordinates(rank);
    Tensors weights = local_weights(model, all, partition, at.pp, at.tp, layout.tp);
    Stage stage(model, Parameters(model, weights, at.tp, layout.tp), options[static_cast<size_t>(rank)]);
    StorePeers peers(store, rank, kRanks, "faults");
    try {
      guarded(peers, kGrace, [&] { body(rank, stage, weights); });
    } catch (const std::exception& e) {
      ended.texts[static_cast<size_t>(rank)] = e.what();
    }
    --running;
  });
  ended.seconds = seconds_since(begin);
  return ended;
}

struct Killed {};

Ended train_with(Layout layout, int victim, Fault fault) {
  std::atomic<int> running{kRanks};
  const auto strike = [&](Fault now) {
    if (fault != now) return;
    if (fault == Fault::kStall) {
      while (running > 1) std::this_thread::sleep_for(milliseconds(5));
      throw Killed();
    }
    throw std::runtime_error("boom");
  };
  const auto step = [&](int rank, Stage& stage, uint64_t number, const std::vector<Inputs>& inputs) {
    const bool struck = rank == victim && number == 1;
    stage.begin_step({number, kMicrobatches, true, false, 0});
    std::vector<at::Tensor> losses(kMicrobatches);
    // The function of a microbatch runs on a thread of its own, as in a script.
    std::vector<std::exception_ptr> errors(kMicrobatches);
    std::vector<std::thread> threads;
    for (int mb = 0; mb < kMicrobatches; ++mb)
      threads.emplace_back([&, mb] {
        try {
          Inputs mine = inputs[static_cast<size_t>(mb)];
          if (struck && mb == 1) {
            strike(Fault::kForward);
            if (fault == Fault::kInsideForward) mine.position_ids = mine.position_ids + (1 << 20);
            if (fault == Fault::kKill) throw Killed();
            strike(Fault::kStall);
          }
          const at::Tensor loss = stage.forward(mb, mine);
          if (struck && mb == 1) strike(Fault::kBackward);
          stage.backward(mb, loss, 1.0 / kMicrobatches);
          stage.finish_microbatch(mb);
        } catch (const Killed&) {
          errors[static_cast<size_t>(mb)] = std::current_exception();
          stage.abort("killed");
        } catch (const std::exception& e) {
          errors[static_cast<size_t>(mb)] = std::current_exception();
          stage.abort(e.what());
        }
      });
    for (std::thread& thread : threads) thread.join();
    // The thread whose error is no consequence of another's.
    std::exception_ptr first;
    for (const std::exception_ptr& error : errors) {
      if (!error) continue;
      try {
        std::rethrow_exception(error);
      } catch (const Error& e) {
        if (!first || e.kind() != ErrorKind::kPeer) first = error;
      } catch (...) {
        first = error;
        break;
      }
    }
    if (first) std::rethrow_exception(first);
    if (struck) strike(Fault::kReduction);
    stage.finish_step(true);
    if (struck) strike(Fault::kOptimizer);
  };
  const Body body = [&](int rank, Stage& stage, Tensors& weights) {
    std::vector<Inputs> inputs = batch(kMicrobatches, 1, 8, 61, 1);
    for (Inputs& in : inputs) in.position_ids = at::arange(8, at::kLong).unsqueeze(0);
    if (rank == victim && fault == Fault::kInsideBackward) {
      const auto calls = std::make_shared<std::atomic<int>>(0);
      weights.begin()->second.register_hook([calls](const at::Tensor& gradient) -> at::Tensor {
        if (++*calls > kMicrobatches + 1) throw std::runtime_error("boom");
        return gradient;
      });
    }
    try {
      for (uint64_t number = 0; number < 4; ++number) step(rank, stage, number, inputs);
    } catch (const Killed&) {  // without a word
    }
  };
  return run_stages(layout, body, running);
}

class Faults : public testing::TestWithParam<std::tuple<Fault, int>> {};

const std::vector<Layout> kLayouts{{.pp = 4}, {.pp = 2, .rdp = 2}, {.rdp = 4}, {.pp = 2, .tp = 2}};

TEST_P(Faults, AreEverybodysErrorInTime) {
  const auto [fault, victim] = GetParam();
  // At once: they spend their time waiting.
  std::vector<Ended> all(kLayouts.size());
  run_ranks(static_cast<int>(kLayouts.size()), [&, fault = fault, victim = victim](int i) {
    all[static_cast<size_t>(i)] = train_with(kLayouts[static_cast<size_t>(i)], victim, fault);
  });
  for (size_t i = 0; i < all.size(); ++i) {
    const Layout& layout = kLayouts[i];
    SCOPED_TRACE(str("pp ", layout.pp, ", rdp ", layout.rdp, ", tp ", layout.tp));
    EXPECT_LT(all[i].seconds, kTimeLimit);
    const bool silent = fault == Fault::kStall || fault == Fault::kKill;
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::string& text = all[i].texts[static_cast<size_t>(rank)];
      if (rank == victim) {
        EXPECT_EQ(text.empty(), silent) << text;
      } else if (silent) {
        EXPECT_THAT(text, HasSubstr(str("rank ", victim, " has died or stalled"))) << "rank " << rank;
      } else {
        EXPECT_THAT(text, HasSubstr(str("rank ", victim, " failed: "))) << "rank " << rank;
        if (fault != Fault::kInsideForward) {
          EXPECT_THAT(text, HasSubstr("boom"));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(FourRanks, Faults,
                         testing::Combine(testing::Values(Fault::kForward, Fault::kInsideForward, Fault::kBackward,
                                                          Fault::kInsideBackward, Fault::kReduction, Fault::kOptimizer),
                                          testing::Values(0, 3)));
// These take their time: the others wait.
INSTANTIATE_TEST_SUITE_P(FourRanksInSilence, Faults,
                         testing::Values(std::tuple(Fault::kStall, 0), std::tuple(Fault::kKill, 3)));

TEST(Faults, WithoutAnyAllRanksEndWell) {
  for (const Layout& layout : kLayouts) {
    for (const std::string& text : train_with(layout, -1, Fault::kForward).texts) EXPECT_EQ(text, "");
  }
}

TEST(Shapes, StagesThatExpectOtherShapesSaySo) {
  std::atomic<int> running{kRanks};
  const Ended ended = run_stages(
      {.pp = 4},
      [&](int rank, Stage& stage, Tensors&) {
        stage.run_step({0, 2, true, false, 0}, batch(2, 1, rank == 2 ? 9 : 8, 61, 1));
      },
      running);
  EXPECT_LT(ended.seconds, kTimeLimit);
  EXPECT_THAT(ended.texts[2], AllOf(HasSubstr("rank 1 sent"), HasSubstr("bytes where rank 2 expects")));
  for (const size_t rank : {0, 1, 3}) EXPECT_THAT(ended.texts[rank], HasSubstr("rank 2 failed: rank 1 sent"));
}

TEST(Shapes, TensorParallelRanksThatBringOtherShapesSaySo) {
  std::atomic<int> running{kRanks};
  const Ended ended = run_stages(
      {.rdp = 2, .tp = 2},
      [&](int rank, Stage& stage, Tensors&) {
        stage.run_step({0, 1, true, false, 0, 2}, batch(1, rank == 1 ? 2 : 1, 8, 61, 1));
      },
      running, true);
  EXPECT_LT(ended.seconds, kTimeLimit);
  for (const size_t rank : {0, 1}) EXPECT_THAT(ended.texts[rank], HasSubstr("batches of one shape"));
}

TEST(Stage, RefusesAnEmptyStage) {
  const FamilyModel model = family(kTinyLlama);
  const ThreadWorld world = make_thread_world(2);
  for (const std::vector<int>& first : {std::vector<int>{0, 0, 4}, {0, 4, 4}, {0, 5, 4}, {1, 2, 4}, {0, 2, 5}}) {
    const Partition partition{first};
    StageOptions options{.partition = partition, .stage = 0};
    options.pipeline = Group(world.groups[0], "pipeline group", kTimeout);
    try {
      Stage stage(model, Parameters(model, initial_weights(model)), options);
      ADD_FAILURE() << "nothing was thrown for " << first[1] << ", " << first[2];
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument) << e.what();
    }
  }
}

}  // namespace
}  // namespace shardsmith::test
