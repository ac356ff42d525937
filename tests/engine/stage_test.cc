// Every layout computes what one process computes.
#include "pipeline/stage.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cmath>

#include "base/error.h"
#include "comm/store_peers.h"
#include "optim/adamw.h"
#include "support.h"

namespace shardsmith::test {
namespace {

using std::chrono::milliseconds;

struct Layout {
  int pp = 1, rdp = 1, tp = 1;
  bool split_sequence = false, prescaled_batch = true;
  ScheduleKind schedule = ScheduleKind::kInterleaved;
  int active = 0;
  std::vector<ActivationCheckpoint> checkpoints = {};
  bool shard = false;
  // Ranks that bring samples of their own.
  int feeders() const { return prescaled_batch ? rdp : rdp * tp; }
  std::string text() const {
    return str("pp ", pp, ", rdp ", rdp, ", tp ", tp, split_sequence ? ", sequences split" : "",
               prescaled_batch ? "" : ", own batches", checkpoints.empty() ? "" : ", checkpointed",
               shard ? ", optimizer state sharded" : "");
  }
};

// One training step of `microbatches` microbatches per feeding rank; feeder f gets the f-th part of all samples.
Outcome step_with(const char* config, Layout layout, int microbatches, bool dropout, at::ScalarType dtype,
                  int steps = 1, bool accumulate = false) {
  const FamilyModel model = family(config);
  const Tensors weights = initial_weights(model, dtype);
  const Mesh mesh(layout.pp * layout.rdp * layout.tp, layout.pp, layout.tp);
  const Partition partition = make_partition(model_costs(model, 0.5, 16).costs, layout.pp);
  Worlds pipelines, replicas, slices;
  std::vector<StageOptions> options;
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    options.push_back({partition, mesh.coordinates(rank).pp,
                       pipelines.group(mesh.pp_group(rank), rank, "pipeline group"),
                       replicas.group(mesh.rdp_group(rank), rank, "data-parallel group"),
                       slices.group(mesh.tp_group(rank), rank, "tensor-parallel group"), layout.split_sequence,
                       layout.prescaled_batch, 11, 0.01, layout.schedule, layout.active, layout.shard});
  }
  const std::vector<Inputs> all = batch(microbatches * layout.feeders(), 2, 16, 61, 5);
  Outcome outcome;
  std::map<std::string, at::Tensor> filled;  // where an element's gradient is known already
  std::mutex mutex;
  run_ranks(mesh.world_size(), [&](int rank) {
    const Coordinates at = mesh.coordinates(rank);
    const Tensors local = local_weights(model, weights, partition, at.pp, at.tp, layout.tp);
    Stage stage(model, Parameters(model, local, at.tp, layout.tp), options[static_cast<size_t>(rank)]);
    stage.set_activation_checkpointing(layout.checkpoints);
    std::vector<at::Tensor> parameters;
    for (const auto& [name, tensor] : local) parameters.push_back(tensor);
    AdamW optimizer({{parameters, 1e-2}});
    const int feeder = layout.prescaled_batch ? at.rdp : at.rdp * layout.tp + at.tp;
    const auto begin = all.begin() + feeder * microbatches;
    for (int i = 0; i < steps; ++i) {
      if (i && !accumulate) {
        optimizer.step();
        optimizer.zero_grad();
      }
      const int first = layout.prescaled_batch ? at.rdp : at.rdp * layout.tp;
      const Stage::Step step{static_cast<uint64_t>(i),
                             microbatches,
                             true,
                             dropout,
                             static_cast<uint64_t>(first * microbatches * 2),
                             static_cast<uint64_t>(microbatches * 2)};
      const std::vector<at::Tensor> losses = stage.run_step(step, {begin, begin + microbatches});
      const double norm = stage.clip_grad_norm(1e9);
      std::lock_guard lock(mutex);
      if (at.rdp != 0 || i + 1 < steps) continue;
      for (size_t t = 0; t < model.tensors.size(); ++t) {
        const std::string& name = model.tensors[t].hf_name;
        if (!local.contains(name)) continue;
        at::Tensor& gradient = outcome.gradients[name];
        at::Tensor& known = filled[name];
        if (!gradient.defined()) gradient = at::zeros_like(weights.at(name)), known = at::zeros_like(gradient);
        const auto visit = [&](const Tensors& own, const at::Tensor& whole, const auto& work) {
          for_each_piece(model, t, whole, own.at(name).grad(), at.tp, layout.tp, work);
        };
        const at::Tensor before = gradient.clone();
        visit(local, gradient, [](at::Tensor to, const at::Tensor& from) { to.copy_(from); });
        EXPECT_TRUE(at::equal(before * known, gradient * known)) << "ranks that hold the same of " << name << " differ";
        visit(local, known, [](at::Tensor to, const at::Tensor&) { to.fill_(1); });
      }
      std::vector<double> values;
      for (const at::Tensor& loss : losses) values.push_back(loss.item<double>());
      if (feeder == 0) {
        if (outcome.losses.empty()) outcome.losses = values;
        EXPECT_EQ(outcome.losses, values) << "ranks see different losses";
      }
      outcome.norm = norm;
    }
  });
  for (const auto& [name, known] : filled) EXPECT_EQ(known.min().item<double>(), 1) << name << " is not whole";
  return outcome;
}

void expect_same(const Outcome& a, const Outcome& b, double tolerance) {
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  for (const auto& [name, gradient] : a.gradients) {
    const double scale = gradient.abs().max().item<double>();
    const double allowed = tolerance > 0 ? tolerance * scale + 1e-12 : 0;
    EXPECT_LE((gradient - b.gradients.at(name)).abs().max().item<double>(), allowed) << name;
  }
  EXPECT_NEAR(a.norm, b.norm, tolerance * a.norm);
}

class Layouts : public testing::TestWithParam<std::tuple<const char*, bool>> {};

TEST_P(Layouts, GiveTheGradientsOfOneProcess) {
  const auto [config, dropout] = GetParam();
  const Outcome one = step_with(config, {1, 1}, 8, dropout, at::kDouble);
  for (const Layout& layout : {Layout{1, 2}, {2, 1}, {2, 2}, {4, 1}, {1, 4}, {4, 2}, {2, 4}}) {
    SCOPED_TRACE("pp " + std::to_string(layout.pp) + ", rdp " + std::to_string(layout.rdp));
    const Outcome many = step_with(config, layout, 8 / layout.rdp, dropout, at::kDouble);
    // The kernels compute dropout in float32, everything else here in float64.
    expect_same(one, many, dropout ? 1e-6 : 1e-10);
    for (size_t i = 0; i < many.losses.size(); ++i) EXPECT_NEAR(one.losses[i], many.losses[i], 1e-6);
  }
}

std::vector<Layout> tensor_layouts() {
  std::vector<Layout> all;
  for (const bool split : {false, true})
    for (const bool prescaled : {true, false})
      for (const auto& [pp, rdp, tp] : {std::tuple{1, 1, 2}, {1, 1, 4}, {2, 1, 2}, {1, 2, 2}, {2, 1, 4}, {2, 2, 2}})
        all.push_back({pp, rdp, tp, split, prescaled});
  return all;
}

TEST_P(Layouts, GiveTheGradientsOfOneProcessWithTensorParallelism) {
  const auto [config, dropout] = GetParam();
  const Outcome one = step_with(config, {}, 8, dropout, at::kDouble);
  for (const Layout& layout : tensor_layouts()) {
    SCOPED_TRACE(layout.text());
    const Outcome many = step_with(config, layout, 8 / layout.feeders(), dropout, at::kDouble);
    expect_same(one, many, dropout ? 1e-6 : 1e-10);
    for (size_t i = 0; i < many.losses.size(); ++i) EXPECT_NEAR(one.losses[i], many.losses[i], 1e-6);
  }
}

// Ranks that share a KV head, a vocabulary that the ranks don't divide, more ranks than one rank's positions need.
TEST(TensorParallelLayouts, OfHeadsThatAreShared) {
  const char* const config = R"({"model_type": "llama", "hidden_size": 36, "num_hidden_layers": 2,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4, "intermediate_size": 45, "vocab_size": 61,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "attention_bias": true, "tie_word_embeddings": false})";
  const Outcome one = step_with(config, {}, 2, false, at::kDouble);
  for (const int tp : {3, 9}) {
    for (const bool split : {false, true}) {
      const Layout layout{1, 1, tp, split};
      SCOPED_TRACE(layout.text());
      expect_same(one, step_with(config, layout, 2, false, at::kDouble), 1e-10);
    }
  }
}

TEST(TensorParallelLayouts, ThatCantWorkSaySo) {
  const FamilyModel model = family(kTinyGpt2);
  try {
    Parameters(model, {}, 0, 3);
    FAIL() << "4 heads on 3 ranks";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
    for (const char* words : {"4 attention heads", "3 tensor-parallel ranks", "1, 2, 4", "pipeline stages"})
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Families, Layouts,
                         testing::Combine(testing::Values(kTinyLlama, kTinyGpt2, kTinyNeox, kTinyBert),
                                          testing::Bool()));

// What is computed again is the same again: each layer by itself, several as one, branches, and a mixture.
TEST_P(Layouts, GiveTheSameBitsWithActivationCheckpointing) {
  const auto [config, dropout] = GetParam();
  const std::vector<std::vector<ActivationCheckpoint>> kinds{
      {{0}, {1}, {2}, {3}},
      {{0}, {0}, {0}, {0}},
      {{-1, true, false}, {-1, false, true}, {-1, true, true}, {}},
      {{}, {5}, {5}, {-1, true, false}}};
  // BERT's layers use their input four times, and autograd adds those gradients in another order.
  const bool same_bits = config != kTinyBert;
  const at::ScalarType dtype = same_bits ? at::kFloat : at::kDouble;
  for (Layout layout : {Layout{}, {2, 2}, {2, 1, 2, true, false}, {1, 2, 2}}) {
    const Outcome usual = step_with(config, layout, 8 / layout.feeders(), dropout, dtype);
    for (const auto& kind : kinds) {
      layout.checkpoints = kind;
      SCOPED_TRACE(layout.text());
      const Outcome again = step_with(config, layout, 8 / layout.feeders(), dropout, dtype);
      EXPECT_EQ(usual.losses, again.losses);
      expect_same(usual, again, same_bits ? 0 : 1e-9);
    }
  }
}

// The order of the work changes nothing: microbatches go backward in the same order under all.
TEST(Layouts, EverySchedulesGradientsAreTheSameBits) {
  const Outcome usual = step_with(kTinyGpt2, {.pp = 4}, 6, false, at::kFloat);
  for (const ScheduleKind kind : {ScheduleKind::kInterleaved, ScheduleKind::kSimple})
    for (const int active : {1, 2, 3, 6}) {
      SCOPED_TRACE(testing::Message() << (kind == ScheduleKind::kSimple ? "simple, " : "interleaved, ") << active);
      const Outcome other = step_with(kTinyGpt2, {.pp = 4, .schedule = kind, .active = active}, 6, false, at::kFloat);
      EXPECT_EQ(usual.losses, other.losses);
      for (const auto& [name, gradient] : usual.gradients)
        EXPECT_TRUE(at::equal(gradient, other.gradients.at(name))) << name;
    }
  const Outcome sliced =
      step_with(kTinyGpt2, {.pp = 2, .tp = 2, .schedule = ScheduleKind::kSimple}, 6, false, at::kFloat);
  expect_same(usual, sliced, 1e-3);
}

TEST(Layouts, TrainTheSameWayForSeveralSteps) {
  const Outcome one = step_with(kTinyLlama, {1, 1}, 4, false, at::kFloat, 6);
  const Outcome two = step_with(kTinyLlama, {2, 1}, 4, false, at::kFloat, 6);
  expect_same(one, two, 1e-3);
  for (size_t i = 0; i < one.losses.size(); ++i) EXPECT_NEAR(one.losses[i], two.losses[i], 1e-5);
}

TEST(Layouts, AccumulateOverStepsTheSameWay) {
  const Outcome one = step_with(kTinyGpt2, {1, 1}, 4, false, at::kDouble, 3, true);
  for (const Layout& layout : {Layout{2, 1}, {1, 2}, {2, 2}}) {
    expect_same(one, step_with(kTinyGpt2, layout, 4 / layout.rdp, false, at::kDouble, 3, true), 1e-10);
  }
}

// The weights after some updates, each replica's optimizer with all parameters or with its shards of them.
Tensors trained(const char* config, Layout layout, at::ScalarType dtype, double* norm) {
  const FamilyModel model = family(config);
  const Tensors weights = initial_weights(model, dtype);
  const Mesh mesh(layout.pp * layout.rdp * layout.tp, layout.pp, layout.tp);
  const Partition partition = make_partition(model_costs(model, 0.5, 16).costs, layout.pp);
  Worlds worlds;
  std::vector<StageOptions> options;
  for (int rank = 0; rank < mesh.world_size(); ++rank)
    options.push_back({.partition = partition,
                       .stage = mesh.coordinates(rank).pp,
                       .pipeline = worlds.group(mesh.pp_group(rank), rank, "pipeline group"),
                       .replicas = worlds.group(mesh.rdp_group(rank), rank, "data-parallel group"),
                       .tensor = worlds.group(mesh.tp_group(rank), rank, "tensor-parallel group"),
                       .split_sequence = layout.split_sequence,
                       .bucket_cap_mb = 0.01,
                       .shard_optimizer_state = layout.shard});
  const std::vector<Inputs> all = batch(4 * layout.rdp, 2, 16, 61, 5);
  Tensors result;
  std::map<std::string, at::Tensor> of_first;
  std::mutex mutex;
  std::vector<std::map<std::string, at::Tensor>> own(static_cast<size_t>(mesh.world_size()));
  int64_t updated = 0;
  run_ranks(mesh.world_size(), [&](int rank) {
    const Coordinates at = mesh.coordinates(rank);
    const Tensors local = local_weights(model, weights, partition, at.pp, at.tp, layout.tp);
    Stage stage(model, Parameters(model, local, at.tp, layout.tp), options[static_cast<size_t>(rank)]);
    std::vector<at::Tensor> parameters;
    for (const auto& [name, tensor] : local) parameters.push_back(tensor);
    if (layout.shard) {
      parameters.clear();
      for (const Shard& shard : stage.shards())
        parameters.push_back(local.at(shard.name).detach().slice(0, shard.begin, shard.end));
    }
    AdamW optimizer({{parameters, 1e-2}});
    for (int i = 0; i < 3; ++i) {
      const auto begin = all.begin() + at.rdp * 4;
      stage.run_step({static_cast<uint64_t>(i), 4, true}, {begin, begin + 4});
      const double here = stage.clip_grad_norm(1e9);
      for (size_t s = 0; s < stage.shards().size(); ++s) {
        const Shard& shard = stage.shards()[s];
        parameters[s].mutable_grad() = local.at(shard.name).grad().slice(0, shard.begin, shard.end);
      }
      optimizer.step();
      stage.gather_shards();
      for (const auto& [name, tensor] : local) at::Tensor(tensor).mutable_grad() = at::Tensor();
      if (rank == 0) *norm = here;
    }
    std::lock_guard lock(mutex);
    own[static_cast<size_t>(rank)] = {local.begin(), local.end()};
    for (const at::Tensor& parameter : parameters) updated += parameter.numel();
    for (size_t t = 0; t < model.tensors.size(); ++t) {
      const std::string& name = model.tensors[t].hf_name;
      if (at.rdp != 0 || !local.contains(name)) continue;
      at::Tensor& whole = result.try_emplace(name, at::zeros_like(weights.at(name))).first->second;
      for_each_piece(model, t, whole, local.at(name).detach(), at.tp, layout.tp,
                     [](at::Tensor to, const at::Tensor& from) { to.copy_(from); });
    }
  });
  int64_t held = 0;
  for (int rank = 0; rank < mesh.world_size(); ++rank)
    for (const auto& [name, tensor] : own[static_cast<size_t>(rank)]) {
      held += tensor.numel();
      const int first = mesh.rdp_group(rank)[0];
      EXPECT_TRUE(at::equal(tensor, own[static_cast<size_t>(first)].at(name))) << name << " differs between replicas";
    }
  EXPECT_EQ(updated * (layout.shard ? layout.rdp : 1), held);  // each element by one replica
  return result;
}

TEST(ShardedOptimizer, GivesTheWeightsOfTheWholeOne) {
  for (const char* config : {kTinyLlama, kTinyGpt2, kTinyNeox, kTinyBert})
    for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16})
      for (Layout layout : {Layout{1, 2}, {2, 2}, {1, 4}, {1, 3}, {1, 2, 2}, {2, 2, 2, true}}) {
        SCOPED_TRACE(layout.text());
        double norm = 0, sharded_norm = 0;
        layout.shard = false;
        const Tensors whole = trained(config, layout, dtype, &norm);
        layout.shard = true;
        const Tensors sharded = trained(config, layout, dtype, &sharded_norm);
        EXPECT_NEAR(norm, sharded_norm, (dtype == at::kDouble ? 1e-10 : 1e-2) * norm);
        for (const auto& [name, tensor] : whole) {
          const at::Tensor other = sharded.at(name);
          if (layout.rdp == 2)  // of two summands the order doesn't matter
            EXPECT_TRUE(at::equal(tensor, other)) << name;
          else
            EXPECT_LE((tensor - other).abs().max().item<double>(), dtype == at::kDouble ? 1e-9 : 3e-2) << name;
        }
      }
}

// Steps that are reduced and steps that aren't, without clearing gradients: as one process adds them up.
TEST(Stage, TiedGradientsOfUnreducedStepsAreSummedOnce) {
  const FamilyModel model = family(kTinyGpt2);
  const Tensors weights = initial_weights(model, at::kDouble);
  const std::vector<Inputs> all = batch(2, 2, 16, 61, 5);
  const auto train = [&](Stage& stage, int number, bool reduce) {
    stage.begin_step({static_cast<uint64_t>(number), 2, true, false, 0, 0, reduce});
    std::vector<at::Tensor> losses(2);
    for (const Task& task :
         training_order(ScheduleKind::kInterleaved, stage.is_first() ? 0 : 1, stage.stages(), 2, 2)) {
      if (task.kind == Task::Kind::kForward)
        losses[static_cast<size_t>(task.microbatch)] =
            stage.forward(task.microbatch, all[static_cast<size_t>(task.microbatch)]);
      else
        stage.backward(task.microbatch, losses[static_cast<size_t>(task.microbatch)], 0.5);
    }
    stage.finish_step(reduce);
  };
  std::map<std::string, at::Tensor> expected;
  std::mutex mutex;
  for (const int stages : {1, 2}) {
    const Partition partition = make_partition(model_costs(model, 0.5, 16).costs, stages);
    ThreadWorld world = make_thread_world(stages);
    run_ranks(stages, [&](int rank) {
      const Tensors local = local_weights(model, weights, partition, rank);
      StageOptions options{.partition = partition, .stage = rank, .seed = 11};
      if (stages > 1)
        options.pipeline = Group(world.groups[static_cast<size_t>(rank)], "pipeline group", milliseconds(20000));
      Stage stage(model, Parameters(model, local), std::move(options));
      train(stage, 0, false);
      train(stage, 1, true);
      train(stage, 2, true);
      train(stage, 3, false);
      train(stage, 4, true);
      std::lock_guard lock(mutex);
      for (const auto& [name, tensor] : local) {
        if (stages == 1) expected[name] = tensor.grad().clone();
        EXPECT_TRUE(at::allclose(tensor.grad(), expected.at(name), 1e-9, 1e-12)) << name << " on stage " << rank;
      }
    });
  }
}

TEST(Layouts, RepeatBitForBit) {
  const Outcome a = step_with(kTinyGpt2, {2, 2}, 4, true, at::kFloat, 3);
  const Outcome b = step_with(kTinyGpt2, {2, 2}, 4, true, at::kFloat, 3);
  for (const auto& [name, gradient] : a.gradients) EXPECT_TRUE(at::equal(gradient, b.gradients.at(name))) << name;
  EXPECT_EQ(a.losses, b.losses);
}

// Two stages on two threads; `body` gets each thread's stage.
void with_two_stages(milliseconds timeout, const std::function<void(int, Stage&, ThreadWorld&)>& body) {
  const FamilyModel model = family(kTinyLlama);
  const Tensors weights = initial_weights(model);
  const Partition partition = make_partition(model_costs(model, 0.5, 16).costs, 2);
  ThreadWorld world = make_thread_world(2);
  run_ranks(2, [&](int rank) {
    StageOptions options{partition, rank, Group(world.groups[static_cast<size_t>(rank)], "pipeline group", timeout)};
    Stage stage(model, Parameters(model, local_weights(model, weights, partition, rank)), std::move(options));
    body(rank, stage, world);
  });
}

TEST(StageFaults, AStalledNeighbourIsNamedInTime) {
  const auto begin = std::chrono::steady_clock::now();
  with_two_stages(milliseconds(300), [](int rank, Stage& stage, ThreadWorld&) {
    if (rank == 0) return;
    try {
      stage.run_step({0, 2, true, false, 0}, batch(2, 1, 8, 61, 1));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kTimeout);
      EXPECT_NE(std::string(e.what()).find("rank 0"), std::string::npos) << e.what();
    }
  });
  EXPECT_LT(seconds_since(begin), 10);
}

TEST(StageFaults, AFailedNeighboursTextArrives) {
  with_two_stages(milliseconds(20000), [](int rank, Stage& stage, ThreadWorld& world) {
    if (rank == 1) return world.rendezvous->fail_rank(1, "out of memory in layer 3");
    try {
      stage.run_step({0, 2, true, false, 0}, batch(2, 1, 8, 61, 1));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kPeer);
      EXPECT_EQ(e.rank(), 1);
      EXPECT_NE(std::string(e.what()).find("out of memory in layer 3"), std::string::npos) << e.what();
    }
  });
}

TEST(Stage, BroadcastBringsTensorsOfAnyKind) {
  with_two_stages(milliseconds(20000), [](int rank, Stage& stage, ThreadWorld&) {
    const std::vector<at::Tensor> sent{at::arange(6, at::kLong).view({2, 3}), at::full({}, 2.5), at::empty({0, 4}),
                                       at::ones({3}, at::kByte)};
    for (const int root : {0, 1}) {
      const std::vector<at::Tensor> got = stage.broadcast(rank == root ? sent : std::vector<at::Tensor>{}, root);
      ASSERT_EQ(got.size(), sent.size());
      for (size_t i = 0; i < sent.size(); ++i) {
        EXPECT_EQ(got[i].scalar_type(), sent[i].scalar_type());
        EXPECT_TRUE(at::equal(got[i], sent[i]));
      }
    }
  });
}

TEST(Stage, ClippingScalesToTheGlobalNorm) {
  with_two_stages(milliseconds(20000), [](int, Stage& stage, ThreadWorld&) {
    stage.run_step({0, 2, true, false, 0}, batch(2, 1, 8, 61, 1));
    const double before = stage.clip_grad_norm(0.05);
    EXPECT_GT(before, 0.05);
    EXPECT_NEAR(stage.grad_norm(), 0.05, 1e-6);
  });
}

// As transformers' Llama, whose embedding has pad_token_id as padding_idx.
TEST(Stage, NumbersThatTheModelHasNoRowForAreNamed) {
  const FamilyModel model = family(kTinyBert);
  const Partition partition = make_partition(model_costs(model, 0.5, 16).costs, 1);
  Stage stage(model, Parameters(model, local_weights(model, initial_weights(model), partition, 0)), {partition});
  const auto refusal = [&](const std::function<void(Inputs&)>& spoil) {
    std::vector<Inputs> inputs = batch(1, 2, 8, 61, 1);
    inputs[0].position_ids = inputs[0].token_type_ids = at::zeros({2, 8}, at::kLong);
    spoil(inputs[0]);
    try {
      stage.run_step({0, 1, false}, inputs);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
      return std::string(e.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_NE(refusal([](Inputs& in) { in.input_ids[1][3] = 61; }).find("input_ids hold 61"), std::string::npos);
  EXPECT_NE(refusal([](Inputs& in) { in.input_ids[1][3] = -2; }).find("0 to 60"), std::string::npos);
  EXPECT_NE(refusal([](Inputs& in) { in.position_ids = in.position_ids + 32; }).find("32 positions"),
            std::string::npos);
  EXPECT_NE(refusal([](Inputs& in) { in.token_type_ids[0][0] = 2; }).find("token_type_ids hold 2"), std::string::npos);
}

TEST(Stage, LookingUpThePaddingRowTrainsItNot) {
  std::string config = kTinyLlama;
  config.replace(config.find("\"tie_word_embeddings\": true"), 27,
                 "\"tie_word_embeddings\": false, \"pad_token_id\": 7");
  const FamilyModel model = family(config.c_str());
  const Partition one{{0, 4}};
  const Tensors weights = local_weights(model, initial_weights(model), one, 0);
  Stage stage(model, Parameters(model, weights), {one});
  std::vector<Inputs> inputs = batch(1, 2, 8, 61, 1);
  inputs[0].input_ids[0].slice(0, 0, 3).fill_(7);
  stage.run_step({0, 1, true, false, 0}, inputs);
  const at::Tensor gradient = weights.at("model.embed_tokens.weight").grad();
  EXPECT_EQ(gradient[7].abs().max().item<float>(), 0);
  EXPECT_GT(gradient.abs().max().item<float>(), 0);
}

TEST(Stage, RefusesAParameterThatIsMissingOrOfAnotherShape) {
  const FamilyModel model = family(kTinyLlama);
  const Partition one{{0, 4}};
  Tensors weights = initial_weights(model);
  Tensors missing = weights;
  missing.erase("model.layers.2.mlp.up_proj.weight");
  EXPECT_THROW(Stage(model, Parameters(model, missing), {one}), Error);
  weights["model.norm.weight"] = at::ones({33});
  EXPECT_THROW(Parameters(model, weights), Error);
}

TEST(StorePeers, ExchangeAndExplainNameTheRankAtFault) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(3, [&](int rank) {
    StorePeers peers(store, rank, 3, "test");
    for (int round = 0; round < 5; ++round) {
      const std::vector<std::string> all =
          peers.exchange(rank == 1 ? "" : std::to_string(rank * round), milliseconds(5000));
      EXPECT_EQ(all, (std::vector<std::string>{"0", "", std::to_string(2 * round)}));
    }
    if (rank == 2) return peers.fail("disk full");
    try {
      peers.exchange("x", milliseconds(5000));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_EQ(e.rank(), 2);
      EXPECT_EQ(peers.explain(e.what(), milliseconds(2000)), "rank 2 failed: disk full");
    }
  });
  run_ranks(3, [&](int rank) {
    StorePeers peers(store, rank, 3, "silent");
    if (rank == 1) return;
    EXPECT_THROW(peers.exchange("x", milliseconds(200)), Error);
    EXPECT_NE(peers.explain("saving", milliseconds(300)).find("rank 1 has died or stalled"), std::string::npos);
  });
}

TEST(AdamW, MatchesItsFormulaAndRefusesDuplicates) {
  at::Tensor w = at::full({3}, 2.0, at::kDouble).requires_grad_(true);
  AdamW optimizer({{{w}, 0.1, 0.9, 0.99, 1e-8, 0.5}});
  double expected = 2.0, m = 0, v = 0;
  for (int t = 1; t <= 4; ++t) {
    const double g = 0.3 * t;
    w.mutable_grad() = at::full({3}, g, at::kDouble);
    optimizer.step();
    expected -= 0.1 * 0.5 * expected;
    m = 0.9 * m + 0.1 * g, v = 0.99 * v + 0.01 * g * g;
    expected -= 0.1 * (m / (1 - std::pow(0.9, t))) / (std::sqrt(v / (1 - std::pow(0.99, t))) + 1e-8);
    EXPECT_NEAR(w[0].item<double>(), expected, 1e-9);
  }
  EXPECT_THROW(AdamW({{{w}}, {{w}}}), Error);
}

}  // namespace
}  // namespace shardsmith::test
