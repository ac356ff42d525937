// A torch module of any kind as one pipeline stage: somebody else computes it, and what is done here is done between
// ranks. Gradients are averaged over the replicas, or over the tensor-parallel ranks too where those bring samples of
// their own; parameters and buffers are brought from rank 0; norms count each parameter once.
//
// The same calls as Stage's, for one stage; threads as there.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "comm/group.h"
#include "nn/parameters.h"
#include "nn/tensor_parallel.h"
#include "optim/reducer.h"

namespace shardsmith {

struct ModuleStageOptions {
  std::optional<Group> replicas;  // rdp group; absent: one replica
  std::optional<Group> tensor;    // tp group; absent: one rank
  // False: each tp rank brings samples of its own, of which layers split over the ranks compute all.
  bool prescaled_batch = true;
  double bucket_cap_mb = 25;
  bool shard_optimizer_state = false;
};

class ModuleStage {
 public:
  // `model` is the whole one, of model type torch_module; `parameters` and `buffers` are this rank's.
  ModuleStage(const FamilyModel& model, const Parameters& parameters, std::vector<at::Tensor> buffers,
              ModuleStageOptions options);
  ModuleStage(const ModuleStage&) = delete;

  void begin_step(double loss_scale);
  // Backpropagates loss (of any shape, with `gradient` of the same shape; undefined: a scalar's 1) * scale.
  void backward(const std::vector<at::Tensor>& losses, const std::vector<at::Tensor>& gradients, double scale);
  void finish_step(bool reduce);
  // Of rank 0 to the others that hold the same.
  void sync_parameters();
  void sync_buffers();

  const std::vector<Shard>& shards() const { return reducer_.shards(); }
  size_t buckets() const { return reducer_.buckets(); }
  void start_gather(size_t bucket);
  void finish_gather() { reducer_.finish_gather(); }
  void gather_shards();
  // As Stage's.
  double grad_norm(double type = 2);
  double clip_grad_norm(double max_norm, double type = 2);

 private:
  bool is_split(const std::string& name) const { return model_.description.split_axes.count(name) > 0; }
  static void broadcast(std::optional<Group>& group, const at::Tensor& tensor);

  FamilyModel model_;
  Parameters parameters_;
  std::vector<at::Tensor> buffers_;
  ModuleStageOptions options_;
  GradientReducer own_batch_;  // over the tp group: of parameters that each rank uses on its own samples
  GradientReducer reducer_;    // over the replicas
  double loss_scale_ = 1;
};

}  // namespace shardsmith
