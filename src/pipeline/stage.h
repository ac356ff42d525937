// One pipeline stage at work: microbatches through its part of the model in the order of a schedule, activations and
// gradients to and from its neighbours, gradients reduced at the step's end.
//
//   forward(mb):   receive hidden from stage - 1 -> compute -> send to stage + 1; the last stage computes the loss and
//                  tells the others its value (they hear of it before their backward is due, so nobody waits for it).
//   backward(mb):  receive the gradient from stage + 1 -> autograd -> send to stage - 1.
//
// Threads: begin_step, finish_step and what has to do with whole steps belong to one thread. forward and backward may
// be called from one thread a microbatch, at once: each waits for its turn. Where there is one thread (C++, one stage),
// run_step is the plain loop over the schedule.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/group.h"
#include "nn/transformer.h"
#include "optim/reducer.h"
#include "pipeline/schedule.h"
#include "pipeline/tied_embedding.h"

namespace shardsmith {

struct StageOptions {
  Partition partition;
  int stage = 0;
  std::optional<Group> pipeline;  // ranks of the group are stages; absent: one stage
  std::optional<Group> replicas;  // rdp group; absent: one replica
  std::optional<Group> tensor;    // tp group; absent: one rank
  bool split_sequence = false;    // between layers each tp rank keeps its own positions (optimize = "memory")
  // False: each tp rank brings samples of its own, and the group works on all of them.
  bool prescaled_batch = true;
  uint64_t seed = 0;  // of dropout masks
  double bucket_cap_mb = 25;
  ScheduleKind schedule = ScheduleKind::kInterleaved;
  int active_microbatches = 0;  // that may hold activations at once; 0: default_active_microbatches()
  // Each replica's optimizer updates its shards of the parameters only; see shards() and gather_shards().
  bool shard_optimizer_state = false;
  BlockSwitches switches;
};

class Stage {
 public:
  // `model` is the whole one; `parameters` are of its local_model on this tp rank.
  Stage(const FamilyModel& model, const Parameters& parameters, StageOptions options);
  Stage(const Stage&) = delete;

  // StageModel's; between steps. Every tp rank of the stage the same.
  void set_activation_checkpointing(const std::vector<ActivationCheckpoint>& layers) {
    compute_.set_activation_checkpointing(layers);
  }
  // Of dropout masks from the next step on: a checkpoint's, so that they go on as they would have. Every rank the same.
  void set_seed(uint64_t seed) { options_.seed = seed; }

  struct Step {
    uint64_t number = 0;
    int microbatches = 1;
    bool training = true;  // by StageOptions::schedule; false: forwards only
    bool dropout = false;
    uint64_t first_sample = 0;  // global number of this replica's first sample
    uint64_t rank_samples = 0;  // samples that each tp rank brings to the step, where they bring their own
    bool reduce = true;         // whether finish_step is going to reduce: what can be sent early then is
    double loss_scale = 1;      // gradients are of the loss times this
  };
  void begin_step(const Step& step);
  // The scalar loss where there are labels: with a graph on the last stage, a plain value elsewhere. Undefined
  // otherwise. Of this rank's own samples.
  at::Tensor forward(int microbatch, const Inputs& inputs);
  // StageModel::output and pooled, of this rank's own samples; last stage, after forward(microbatch); all tp ranks
  // together. With a graph until backward(microbatch), plain values after it.
  at::Tensor output(int microbatch);
  at::Tensor pooled(int microbatch);
  // `loss` counts on the last stage only, where `loss * scale` is backpropagated.
  void backward(int microbatch, const at::Tensor& loss, double scale);
  void finish_microbatch(int microbatch);
  void abort(const std::string& text);
  // Waits for what is still on its way; with `reduce`, sums this step's gradients of a tied embedding over first and
  // last stage and averages all gradients over the replicas. Throws if a microbatch is unfinished.
  void finish_step(bool reduce);

  // All microbatches by the schedule on the calling thread, loss scaled by 1 / microbatches, gradients reduced.
  // Returns the losses.
  std::vector<at::Tensor> run_step(const Step& step, const std::vector<Inputs>& microbatches);

  // Tensors of stage `root` on every stage. Others' argument is not looked at.
  std::vector<at::Tensor> broadcast(std::vector<at::Tensor> tensors, int root);
  // Parameters of replica 0 to the others, a tied embedding from the first stage to the last.
  void sync_parameters();
  // What this rank's optimizer is to update where its state is sharded: after finish_step their gradients are the
  // averages, of no other rows. None where it is not sharded.
  const std::vector<Shard>& shards() const { return reducer_.shards(); }
  // The shards of these buckets have been updated: brings them to the other replicas. start_gather may be called bucket
  // by bucket while others are still updated; all replicas in the same order.
  size_t buckets() const { return reducer_.buckets(); }
  void start_gather(size_t bucket);
  void finish_gather() { reducer_.finish_gather(); }
  void gather_shards();
  // Norm of the gradients over all stages and tp ranks, each parameter once; not finite if a gradient isn't. `type` as
  // in GradientNorm.
  double grad_norm(double type = 2);
  // Scales all gradients by max_norm / (norm + 1e-6) where that is below 1 (torch's clip_grad_norm_). Returns the norm.
  double clip_grad_norm(double max_norm, double type = 2);

  bool is_first() const { return options_.stage == 0; }
  bool is_last() const { return options_.stage == options_.partition.stages() - 1; }
  int stages() const { return options_.partition.stages(); }

 private:
  struct Microbatch {
    at::Tensor input;   // what came from the stage before; a leaf with a gradient while training
    at::Tensor output;  // hidden states that left
    at::Tensor loss;    // last stage, where there are labels
    Inputs inputs;
    DropoutContext dropout;
  };
  enum class Edge { kForward, kBackward, kLoss, kBroadcast, kTied, kTiedRows, kCount };
  int tag(Edge edge, int microbatch) const;
  DropoutContext dropout_of(int microbatch, int64_t own_rows) const;
  void post_forward_receive(int microbatch, const Inputs& like);
  void hold(Pending pending);
  at::TensorOptions boundary() const;  // of what is sent between stages
  bool has_replicas() const { return options_.replicas && options_.replicas->size() > 1; }
  GradientReducer make_reducer() const;
  // Of this step's gradients, each parameter once over all ranks of the replica (and of all replicas where sharded).
  std::vector<at::Tensor> counted_gradients() const;
  TiedEmbedding::Tags tied_tags() const { return {tag(Edge::kTied, 0), tag(Edge::kTiedRows, 0)}; }
  void wait_for_sends();
  const Microbatch& computed(int microbatch) const;
  // forward without waiting for another stage's loss: that is what it returns, empty where there is none to wait for.
  Pending start_forward(int microbatch, const Inputs& own);

  FamilyModel model_;
  Parameters parameters_;
  StageOptions options_;
  TensorParallel ranks_;
  StageModel compute_;
  GradientReducer reducer_;
  TiedEmbedding tied_;          // where this stage is the first or the last of several
  int backwards_ = 0;           // of this step so far
  bool last_backward_ = false;  // the running one is the last, and gradients are going to be reduced
  Turns turns_;
  Step step_;
  std::vector<Microbatch> microbatches_;
  std::vector<Pending> incoming_;  // forward receives already posted, by microbatch
  std::vector<Pending> outgoing_;  // sends under way
  uint64_t broadcasts_ = 0;
};

}  // namespace shardsmith
