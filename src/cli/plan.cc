#include <algorithm>
#include <iostream>
#include <sstream>

#include "base/error.h"
#include "cli/command_line.h"
#include "cli/describe.h"
#include "cli/source.h"
#include "cli/verbs.h"
#include "family/family.h"
#include "family/tensor_parallel.h"
#include "layout/mesh.h"
#include "pipeline/training_memory.h"
#include "storage/storage.h"

namespace shardsmith::cli {
namespace {

// A checkpoint holds weights (or their masters) and AdamW's two moments in float32.
constexpr int64_t kCheckpointBytes = 12;

struct Stage {
  int64_t parameters = 0;  // of one rank
  TrainingMemory memory;
  std::vector<std::string> ranks;
};

int64_t parameters_of(const FamilyModel& model, const std::vector<size_t>& tensors, int tp) {
  int64_t total = 0;
  for (const size_t i : tensors) {
    for (const auto& piece : model.tensors[i].pieces) {
      // Of the first rank, which holds no less than the others.
      total += volume(tensor_parallel_box(model.description, piece.name, piece.shape, 0, tp).extent);
    }
  }
  return total;
}

struct Options {
  std::string config;
  int pp = 1, tp = 1, nproc = 0;
  double memory_weight = 0.8;
  std::string placement = "cluster";
  // As finetune's.
  int64_t batch = 8, sequence = 0;
  int microbatches = 0;
  bool bf16 = false, fp16 = false, shard_optimizer_state = false;
  std::string checkpointing = "none";
};

// The defaults are finetune's: of several stages as many as divide the batch, up to 8.
int microbatches_of(const Options& options) {
  int count = options.microbatches;
  if (count == 0 && options.pp == 1) return 1;
  if (count == 0)
    for (count = static_cast<int>(std::min<int64_t>(8, options.batch)); options.batch % count != 0;) --count;
  if (options.batch % count != 0)
    fail(ErrorKind::kInvalidArgument, "plan: --per-device-train-batch-size ", options.batch, " can't be split into ",
         count, " microbatches: take a number that divides it");
  return count;
}

TrainingOptions training_options(const Options& options, const ModelDescription& model, int replicas) {
  if (options.bf16 && options.fp16) fail(ErrorKind::kInvalidArgument, "plan: --bf16 and --fp16 exclude each other");
  if (options.batch < 1 || options.microbatches < 0 || options.sequence < 0)
    fail(ErrorKind::kInvalidArgument,
         "plan: --per-device-train-batch-size, --microbatches and --max-seq-length must be at least 1");
  if (options.sequence > model.num_positions)
    fail(ErrorKind::kInvalidArgument, "plan: --max-seq-length ", options.sequence, " is above the model's ",
         model.num_positions, " positions");
  TrainingOptions training;
  training.microbatches = microbatches_of(options);
  training.work.rows = options.batch / training.microbatches;
  training.work.sequence = options.sequence > 0 ? options.sequence : std::min<int64_t>(model.num_positions, 1024);
  training.work.tp = options.tp;
  training.work.split_sequence = true;
  training.work.precision = options.bf16 ? Precision::kBf16 : options.fp16 ? Precision::kFp16 : Precision::kFp32;
  training.rdp = replicas;
  training.shard_optimizer_state = options.shard_optimizer_state;
  training.checkpointed_layers = checkpointed_layers(options.checkpointing);
  return training;
}

std::string config_path(const std::string& path) {
  const std::string given = given_path(path);
  return local_storage().stat(given).is_directory ? join(given, "config.json") : given;
}

Value stage_value(const Stage& stage, const Partition& partition, int number) {
  Value value;
  value.set("stage", number);
  value.set("first_layer", partition.first[number]);
  value.set("end_layer", partition.first[number + 1]);
  value.set("embedding", number == 0);
  value.set("head", number + 1 == partition.stages());
  List ranks;
  for (const auto& slice : stage.ranks) {
    std::istringstream words(slice);
    for (std::string word; std::getline(words, word, ',');) ranks.emplace_back(std::stoi(word));
  }
  value.set("ranks", ranks);
  value.set("parameters", stage.parameters);
  for (const auto& [name, bytes] : stage.memory.parts()) value.set(std::string(name) + "_bytes", bytes);
  value.set("total_bytes", stage.memory.total());
  return value;
}

}  // namespace

int run_plan(const Arguments& arguments) {
  CommandLine line(
      "plan",
      "What each rank would hold, from a config.json alone: the partition over stages, parameters, the memory that\n"
      "training with AdamW takes at its fullest moment, and a checkpoint's size.");
  Options options;
  auto& app = line.app();
  app.add_option("--config", options.config, "A config.json, or the folder that holds one")->required();
  app.add_option("--pipeline-parallel-degree", options.pp, "Pipeline stages")->capture_default_str();
  app.add_option("--tensor-parallel-degree", options.tp, "Ranks that share each layer")->capture_default_str();
  app.add_option("--nproc", options.nproc, "Ranks in all; default: pipeline x tensor");
  app.add_option("--placement-strategy", options.placement, "cluster, spread or a permutation of DPT")
      ->capture_default_str();
  app.add_option("--memory-weight", options.memory_weight, "Balance memory (1) or computation (0) over the stages")
      ->capture_default_str();
  app.add_option("--per-device-train-batch-size", options.batch, "Sequences of a replica in one forward and backward")
      ->capture_default_str();
  app.add_option("--microbatches", options.microbatches, "Per batch; default: up to 8 where there are several stages");
  app.add_option("--max-seq-length", options.sequence, "Tokens of a sequence; default: the model's, at most 1024");
  app.add_flag("--bf16", options.bf16, "Parameters in bfloat16, with float32 masters");
  app.add_flag("--fp16", options.fp16, "Parameters in float16, with float32 masters");
  app.add_flag("--shard-optimizer-state", options.shard_optimizer_state,
               "Masters and moments are dealt out to the replicas");
  app.add_option("--activation-checkpointing", options.checkpointing,
                 "none, each (layer), contiguous or group_N: layers that are computed again for their backward")
      ->capture_default_str();
  if (!line.parse(arguments)) return 0;
  if (options.memory_weight < 0 || options.memory_weight > 1) {
    fail(ErrorKind::kInvalidArgument, "plan: --memory-weight is ", options.memory_weight,
         ", it must be between 0 and 1");
  }
  if (options.pp < 1 || options.tp < 1 || options.nproc < 0) {
    fail(ErrorKind::kInvalidArgument, "plan: degrees and --nproc must be at least 1");
  }

  Storage& storage = local_storage();
  const std::string path = config_path(options.config);
  const FamilyModel model = describe_model(parse_json(read_text(storage, path), path));
  const int world_size = options.nproc > 0 ? options.nproc : options.pp * options.tp;
  check_tensor_parallel(model.description, options.tp);
  const Mesh mesh(world_size, options.pp, options.tp, options.placement);
  const TrainingOptions training = training_options(options, model.description, mesh.rdp_size());
  const ModelCosts costs = model_costs(model, options.memory_weight);
  const Partition partition = make_partition(costs.costs, options.pp);
  const double even = balance(costs.costs, partition);

  std::vector<Stage> stages;
  for (int s = 0; s < partition.stages(); ++s) {
    stages.push_back({parameters_of(model, stage_tensors(model, partition, s), options.tp),
                      training_memory(model, partition, s, training), stage_ranks(mesh, s)});
  }
  int64_t parameters = 0;
  for (const auto& tensor : model.tensors) parameters += volume(tensor.shape);
  const int64_t checkpoint = kCheckpointBytes * parameters;  // a tied tensor stands in it once

  if (line.output().json) {
    Value object;
    object.set("model_type", model.description.model_type);
    object.set("parameters", parameters);
    object.set("world_size", world_size);
    object.set("pipeline_parallel_degree", options.pp);
    object.set("tensor_parallel_degree", options.tp);
    object.set("reduced_data_parallel_degree", mesh.rdp_size());
    object.set("placement", mesh.placement());
    object.set("partition", List(partition.first.begin(), partition.first.end()));
    object.set("balance", even);
    List list;
    for (int s = 0; s < partition.stages(); ++s) list.push_back(stage_value(stages[s], partition, s));
    object.set("stages", list);
    object.set("checkpoint_bytes", checkpoint);
    line.output().print(object);
    return 0;
  }
  std::cout << bold(model.description.model_type) << ": " << human_count(parameters) << " parameters, "
            << model.description.num_layers << " layers; " << world_size << (world_size == 1 ? " rank" : " ranks")
            << ": pp " << options.pp << ", tp " << options.tp << ", rdp " << mesh.rdp_size() << "\n\n";
  std::vector<bool> right(10, true);
  right[0] = right[1] = right[2] = false;
  Table table(right);
  table.add({bold("STAGE"), bold("HOLDS"), bold("RANKS"), bold("PARAMETERS"), bold("WEIGHTS"), bold("GRADIENTS"),
             bold("ADAMW"), bold("ACTIVATIONS"), bold("WORKING"), bold("A RANK")});
  for (int s = 0; s < partition.stages(); ++s) {
    const Stage& stage = stages[s];
    const TrainingMemory& memory = stage.memory;
    std::string ranks;
    for (const auto& slice : stage.ranks) ranks += (ranks.empty() ? "" : ", ") + slice;
    std::vector<std::string> cells{std::to_string(s), stage_words(partition, s), ranks, human_count(stage.parameters)};
    for (const int64_t bytes : {memory.weights, memory.gradients, memory.masters + memory.moments, memory.activations,
                                memory.working, memory.total()})
      cells.push_back(human_bytes(static_cast<uint64_t>(bytes)));
    table.add(cells);
  }
  std::cout << table.text("") << "\nA rank's memory at the fullest moment of a step: " << training.microbatches
            << (training.microbatches == 1 ? " microbatch" : " microbatches") << " of " << training.work.rows << " x "
            << training.work.sequence << " tokens; gradients come while activations go\nbalance "
            << static_cast<int>(100 * even + 0.5) << " % (the mean stage over the costliest); a checkpoint takes about "
            << human_bytes(static_cast<uint64_t>(checkpoint)) << "\n";
  return 0;
}

}  // namespace shardsmith::cli
