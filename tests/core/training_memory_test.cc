#include "pipeline/training_memory.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace shardsmith {
namespace {

FamilyModel gpt2(double dropout = 0.1, int layers = 12) {
  Value config;
  config.set("model_type", "gpt2");
  config.set("vocab_size", 50257);
  config.set("n_positions", 1024);
  config.set("n_embd", 768);
  config.set("n_layer", layers);
  config.set("n_head", 12);
  for (const char* name : {"attn_pdrop", "resid_pdrop", "embd_pdrop"}) config.set(name, dropout);
  return describe_model(config);
}

FamilyModel llama(bool tied = false) {
  Value config;
  config.set("model_type", "llama");
  config.set("vocab_size", 32000);
  config.set("hidden_size", 768);
  config.set("intermediate_size", 2048);
  config.set("num_hidden_layers", 12);
  config.set("num_attention_heads", 12);
  config.set("num_key_value_heads", 4);
  config.set("max_position_embeddings", 1024);
  config.set("tie_word_embeddings", tied);
  return describe_model(config);
}

TrainingOptions options(int64_t rows = 4, int64_t sequence = 256) {
  TrainingOptions o;
  o.work.rows = rows;
  o.work.sequence = sequence;
  return o;
}

Partition whole(const FamilyModel& model) { return {{0, static_cast<int>(model.description.num_layers)}}; }

TrainingMemory of(const FamilyModel& model, const TrainingOptions& o) {
  return training_memory(model, whole(model), 0, o);
}

constexpr int64_t kParameters = 124439808;  // GPT-2 small's
constexpr int64_t kHidden = 4 * 256 * 768;  // elements of hidden states
constexpr int64_t kScores = 4 * 12 * 256 * 256;

TEST(TrainingMemory, PartsAreTheTotal) {
  const TrainingMemory memory = of(gpt2(), options());
  int64_t sum = 0;
  for (const auto& [name, bytes] : memory.parts()) {
    EXPECT_GE(bytes, 0) << name;
    sum += bytes;
  }
  EXPECT_EQ(sum, memory.total());
}

TEST(TrainingMemory, CountsWeightsMastersAndMomentsOfEachPrecision) {
  TrainingOptions o = options();
  TrainingMemory memory = of(gpt2(), o);
  EXPECT_EQ(memory.weights, 4 * kParameters);
  EXPECT_EQ(memory.masters, 0);
  EXPECT_EQ(memory.moments, 8 * kParameters);
  for (const Precision precision : {Precision::kBf16, Precision::kFp16}) {
    o.work.precision = precision;
    memory = of(gpt2(), o);
    EXPECT_EQ(memory.weights, 2 * kParameters);
    EXPECT_EQ(memory.masters, 4 * kParameters);
    EXPECT_EQ(memory.moments, 8 * kParameters);
  }
}

constexpr int64_t kRowsOfNorms = 2 * 4 * 256 * 2 * 4;  // bytes: of each row of two norms its mean and its scale

// Of GPT-2 in float32, with and without dropout, counted by hand: the sums that nn/block.cc keeps.
TEST(TrainingMemory, ALayerOfGpt2KeepsWhatIsCountedByHand) {
  const ActivationMemory plain(gpt2(0), {4, 256});
  // Norms' inputs and results, q k v, weighted sum, logarithms of sums, before and after GELU.
  EXPECT_EQ(plain.layer(), 4 * (kHidden * (2 + 2 + 3 + 1 + 4 + 4) + 4 * 12 * 256) + kRowsOfNorms);
  const ActivationMemory dropped(gpt2(0.1), {4, 256});
  EXPECT_EQ(dropped.layer(), 4 * (kHidden * (16 + 2) + 3 * kScores) + kRowsOfNorms);
  const ActivationMemory narrow(gpt2(0.1), {4, 256, 1, false, Precision::kBf16});
  EXPECT_EQ(narrow.layer(), 2 * kHidden * (16 + 2) + (2 + 2 + 2) * kScores + kRowsOfNorms);
  // No kernel: softmax is done in float32.
  const ActivationMemory half(gpt2(0.1), {4, 256, 1, false, Precision::kFp16});
  EXPECT_EQ(half.layer(), 2 * kHidden * (16 + 2) + (4 + 2 + 2) * kScores + kRowsOfNorms);
}

TEST(TrainingMemory, ALayerOfLlamaKeepsWhatIsCountedByHand) {
  const int64_t mlp = 4 * 256 * 2048, keys = kHidden / 3, sums = 4 * 256 * 12;
  const ActivationMemory wide(llama(), {4, 256});
  EXPECT_EQ(wide.layer(), 4 * (kHidden * (2 + 2 + 1 + 1) + 2 * keys + 3 * mlp + sums) + kRowsOfNorms);
  EXPECT_TRUE(wide.keeps_input());
  const ActivationMemory narrow(llama(), {4, 256, 1, false, Precision::kBf16});
  EXPECT_EQ(narrow.layer(), 2 * (kHidden * (2 + 2 + 1 + 1) + 2 * keys + 3 * mlp) + 4 * sums + kRowsOfNorms);
  // No kernels: of a norm also the input as float32; of SiLU times up also SiLU's result.
  const ActivationMemory half(llama(), {4, 256, 1, false, Precision::kFp16});
  EXPECT_EQ(half.layer() - narrow.layer(), 2 * 4 * kHidden - kRowsOfNorms + 2 * mlp);
  EXPECT_FALSE(half.keeps_input());
}

TEST(TrainingMemory, GrowsWithRowsSequenceAndMicrobatchesThatAreActive) {
  for (const FamilyModel& model : {gpt2(), llama()}) {
    int64_t before = 0;
    for (const int64_t rows : {1, 2, 4, 8, 16}) {
      const TrainingMemory memory = of(model, options(rows));
      EXPECT_GT(memory.total(), before);
      before = memory.total();
    }
    EXPECT_GT(of(model, options(4, 512)).activations, 2 * of(model, options(4, 256)).activations - 1);
    const Partition two{{0, 6, 12}};
    TrainingOptions o = options(16);  // gradients are few beside activations
    o.microbatches = 8;
    o.schedule = ScheduleKind::kSimple;
    before = 0;
    for (const int active : {1, 2, 4, 8}) {
      o.active_microbatches = active;
      const int64_t kept = training_memory(model, two, 0, o).activations;
      EXPECT_GT(kept, before);
      if (active > 1) {
        EXPECT_NEAR(static_cast<double>(kept) / static_cast<double>(before), 2, 0.04);
      }
      before = kept;
    }
    // One forward, one backward: the first of two stages holds two microbatches, the last one one.
    o.schedule = ScheduleKind::kInterleaved;
    o.active_microbatches = 0;
    const int64_t first = training_memory(model, two, 0, o).activations,
                  last = training_memory(model, two, 1, o).activations;
    EXPECT_GT(static_cast<double>(first), 1.6 * static_cast<double>(last));
  }
}

TEST(TrainingMemory, TensorParallelRanksHoldAboutAPartOfTheLayers) {
  const FamilyModel model = llama();
  TrainingOptions o = options();
  const TrainingMemory one = of(model, o);
  o.work.tp = 2;
  const TrainingMemory speed = of(model, o);
  o.work.split_sequence = true;
  const TrainingMemory memory = of(model, o);
  EXPECT_NEAR(static_cast<double>(speed.weights) / static_cast<double>(one.weights), 0.5, 0.01);
  EXPECT_LT(speed.activations, one.activations);
  EXPECT_GT(speed.activations, one.activations / 2);
  EXPECT_LT(memory.activations, speed.activations);
  // What is within a layer is halved exactly.
  const ActivationMemory whole_layer(model, {4, 256}), half_layer(model, {4, 256, 2});
  const int64_t replicated = 4 * 4 * kHidden + kRowsOfNorms;  // inputs and results of two norms
  EXPECT_EQ(2 * (half_layer.layer() - replicated), whole_layer.layer() - replicated);
}

TEST(TrainingMemory, ShardingDividesMastersAndMomentsAndNothingElse) {
  for (const Precision precision : {Precision::kFp32, Precision::kBf16}) {
    TrainingOptions o = options();
    o.work.precision = precision;
    o.rdp = 4;
    const TrainingMemory whole_state = of(gpt2(), o);
    o.shard_optimizer_state = true;
    const TrainingMemory sharded = of(gpt2(), o);
    EXPECT_EQ(sharded.weights, whole_state.weights);
    EXPECT_EQ(sharded.activations, whole_state.activations);
    EXPECT_NEAR(static_cast<double>(sharded.moments), static_cast<double>(whole_state.moments) / 4,
                0.01 * static_cast<double>(whole_state.moments));
    EXPECT_NEAR(static_cast<double>(sharded.masters), static_cast<double>(whole_state.masters) / 4,
                0.01 * static_cast<double>(whole_state.moments));
    o.rdp = 1;  // nobody to share with
    EXPECT_EQ(of(gpt2(), o).moments, whole_state.moments);
  }
}

TEST(TrainingMemory, CheckpointingKeepsInputsOnly) {
  const FamilyModel model = gpt2();
  TrainingOptions o = options(8);
  const TrainingMemory none = of(model, o);
  o.checkpointed_layers = checkpointed_layers("each");
  const TrainingMemory each = of(model, o);
  // Twelve inputs, the embedding's mask and the last hidden states; when the last layer is computed again for its
  // backward, the head has let go of its own.
  const ActivationMemory activation(model, {8, 256});
  EXPECT_EQ(each.activations, 4 * 2 * kHidden * (12 + 1 + 1 - 1) + activation.layer());
  EXPECT_LT(each.total(), none.total());
  o.checkpointed_layers = checkpointed_layers("group_4");
  const TrainingMemory group = of(model, o);
  o.checkpointed_layers = checkpointed_layers("contiguous");
  const TrainingMemory all = of(model, o);
  EXPECT_LT(each.total(), group.total());
  EXPECT_LT(group.total(), all.total());  // all layers at once again, when their backward is due
  EXPECT_NEAR(static_cast<double>(all.total()) / static_cast<double>(none.total()), 1, 0.02);
}

TEST(TrainingMemory, AHeadsGradientHasASpareWhereItIsAddedTo) {
  TrainingOptions o = options(1);
  const int64_t head = int64_t{4} * 50257 * 768;
  const TrainingMemory one = of(gpt2(), o);
  o.microbatches = 2;
  const TrainingMemory two = of(gpt2(), o);
  EXPECT_GE(two.working - one.working, head - 64 * (1 << 20));
}

TEST(TrainingMemory, EveryFamilyAndLayoutHasANumber) {
  for (const FamilyModel& model : {gpt2(), llama(), llama(true)})
    for (const int tp : {1, 2, 4})
      for (const int stages : {1, 3})
        for (const int64_t layers : {int64_t{0}, int64_t{1}, int64_t{5}, kAllLayers})
          for (const int rdp : {1, 3}) {
            TrainingOptions o = options(2, 64);
            o.work.tp = tp;
            o.work.split_sequence = tp > 2;
            o.rdp = rdp;
            o.shard_optimizer_state = rdp > 1 && tp > 1;
            o.checkpointed_layers = layers;
            o.microbatches = 3;
            const Partition partition = make_partition(model_costs(model, 0.8, 64).costs, stages);
            for (int stage = 0; stage < stages; ++stage) {
              const TrainingMemory memory = training_memory(model, partition, stage, o);
              for (const auto& [name, bytes] : memory.parts()) EXPECT_GE(bytes, 0) << name;
              EXPECT_GT(memory.gradients + memory.activations, 0);
            }
          }
}

TEST(TrainingMemory, RefusesWhatIsNoLayout) {
  const FamilyModel model = gpt2();
  const auto kind = [&](const TrainingOptions& o, int stage = 0) {
    try {
      training_memory(model, whole(model), stage, o);
    } catch (const Error& error) {
      return error.kind();
    }
    return ErrorKind::kIo;
  };
  TrainingOptions bad = options(0);
  EXPECT_EQ(kind(bad), ErrorKind::kInvalidArgument);
  bad = options();
  bad.microbatches = 0;
  EXPECT_EQ(kind(bad), ErrorKind::kInvalidArgument);
  bad = options();
  bad.work.tp = 5;
  EXPECT_EQ(kind(bad), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind(options(), 1), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind(options(), -1), ErrorKind::kInvalidArgument);
}

TEST(TrainingMemory, ReadsTheWordsOfItsOptions) {
  EXPECT_EQ(checkpointed_layers("none"), 0);
  EXPECT_EQ(checkpointed_layers("each"), 1);
  EXPECT_EQ(checkpointed_layers("group_3"), 3);
  EXPECT_EQ(checkpointed_layers("contiguous"), kAllLayers);
  for (const char* word : {"", "all", "group_", "group_0", "group_-1", "group_2x", "group_99999999999999999999"})
    EXPECT_THROW(checkpointed_layers(word), Error) << word;
  EXPECT_EQ(precision_of("bf16"), Precision::kBf16);
  EXPECT_THROW(precision_of("fp64"), Error);
}

}  // namespace
}  // namespace shardsmith
