// How much memory one rank needs to train, from the model's configuration and the layout alone. Pure arithmetic.
//
// A step is followed in the order of its schedule. Each kind of memory is counted at its own largest: gradients come
// while activations go, but an allocator (the C library's heap, torch's cache on a GPU) keeps what it once had, in
// pieces that seldom fit the other kind. docs/verbs/plan.md has the measurements.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "layout/partition.h"
#include "pipeline/activation_memory.h"
#include "pipeline/schedule.h"

namespace shardsmith {

struct TrainingOptions {
  Workload work;  // of one microbatch
  int rdp = 1;    // replicas
  int microbatches = 1;
  ScheduleKind schedule = ScheduleKind::kInterleaved;
  int active_microbatches = 0;  // 0: default_active_microbatches()
  bool accumulates = false;     // several batches an update: gradients are there before the step's first backward
  bool shard_optimizer_state = false;  // masters and moments over the replicas
  int64_t checkpointed_layers = 0;     // neighbours that are computed again together; 0: none, kAllLayers: a stage's
  double bucket_cap_mb = 25;           // of gradients that are reduced together
};
inline constexpr int64_t kAllLayers = int64_t{1} << 40;
// The words of the options: "none", "each", "contiguous", "group_N" -> checkpointed_layers. Throws kInvalidArgument.
int64_t checkpointed_layers(const std::string& word);

// Bytes, each at its largest after the first step, with AdamW.
struct TrainingMemory {
  int64_t weights = 0;
  int64_t gradients = 0;
  int64_t masters = 0;      // of bf16 and fp16
  int64_t moments = 0;      // two, in float32
  int64_t activations = 0;  // that microbatches keep, and that are computed again for a backward
  int64_t working = 0;      // logits of a chunk, gradients of activations, tensors under way to other ranks, libraries
  int64_t total() const { return weights + gradients + masters + moments + activations + working; }
  // By name, for those who print them.
  std::array<std::pair<const char*, int64_t>, 6> parts() const;
};

// `model` is the whole one. Of the first tensor-parallel rank and, sharded, the replica with the largest shards: none
// needs more. Throws kInvalidArgument for counts below 1, a stage that isn't there, degrees that the model doesn't
// admit.
TrainingMemory training_memory(const FamilyModel& model, const Partition& partition, int stage,
                               const TrainingOptions& options);

}  // namespace shardsmith
