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

namespace shardsmith {

struct StageOptions {
  Partition partition;
  int stage = 0;
  std::optional<Group> pipeline;  // ranks of the group are stages; absent: one stage
  std::optional<Group> replicas;  // rdp group; absent: one replica
  uint64_t seed = 0;              // of dropout masks
  double bucket_cap_mb = 25;
};

class Stage {
 public:
  Stage(const FamilyModel& model, const Parameters& parameters, StageOptions options);

  struct Step {
    uint64_t number = 0;
    int microbatches = 1;
    bool training = true;  // 1F1B; false: forwards only
    bool dropout = false;
    uint64_t first_sample = 0;  // global number of this replica's first sample
    bool reduce = true;         // whether finish_step is going to reduce: what can be sent early then is
  };
  void begin_step(const Step& step);
  // The scalar loss where there are labels: with a graph on the last stage, a plain value elsewhere. Undefined
  // otherwise.
  at::Tensor forward(int microbatch, const Inputs& inputs);
  // [B, S, V]; last stage, after forward(microbatch). With a graph until backward(microbatch), a plain value after it.
  at::Tensor logits(int microbatch);
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
  // L2 norm of the gradients over all stages, each parameter once.
  double grad_norm();
  // Scales all gradients by max_norm / (norm + 1e-6) where that is below 1 (torch's clip_grad_norm_). Returns the norm.
  double clip_grad_norm(double max_norm);

  bool is_first() const { return options_.stage == 0; }
  bool is_last() const { return options_.stage == options_.partition.stages() - 1; }
  int stages() const { return options_.partition.stages(); }

 private:
  struct Microbatch {
    at::Tensor input;   // what came from the stage before; a leaf with a gradient while training
    at::Tensor output;  // hidden states that left
    at::Tensor loss;    // last stage, where there are labels
    Inputs inputs;
  };
  enum class Edge { kForward, kBackward, kLoss, kBroadcast, kTied, kTiedRows, kCount };
  int tag(Edge edge, int microbatch) const;
  void post_forward_receive(int microbatch, const Inputs& like);
  void hold(Pending pending);
  // A tied embedding's gradient is made on two stages. The last one's, of the head, is dense, and is sent as soon as
  // its last backward is done, while the first stage still computes; the first one's has the rows that were looked up,
  // and only those travel back. Both then add the same rows to the same head's gradient: the same bits on both.
  void begin_tied();
  void send_head_gradient();
  void post_head_gradient();
  void sum_tied();
  void leave_tied();
  // forward without waiting for another stage's loss: that is what it returns, empty where there is none to wait for.
  Pending start_forward(int microbatch, const Inputs& inputs);

  FamilyModel model_;
  Parameters parameters_;
  StageOptions options_;
  StageModel compute_;
  GradientReducer reducer_;
  at::Tensor tied_;                    // the tied embedding, where this stage is the first or the last of several
  at::Tensor tied_before_;             // its gradient of earlier steps, which is summed already
  bool tied_summed_ = true;            // its gradient is all summed, or there is none
  bool head_sent_ = false;             // last stage: its gradient is on its way
  Pending head_gradient_;              // first stage: the same, coming
  std::vector<at::Tensor> looked_up_;  // first stage: input_ids since the last sum
  int backwards_ = 0;                  // of this step so far
  Turns turns_;
  Step step_;
  std::vector<Microbatch> microbatches_;
  std::vector<Pending> incoming_;  // forward receives already posted, by microbatch
  std::vector<Pending> outgoing_;  // sends under way
  uint64_t broadcasts_ = 0;
};

}  // namespace shardsmith
