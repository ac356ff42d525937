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
#include "storage/storage.h"

namespace shardsmith::cli {
namespace {

// Trained in fp32 with AdamW, bf16 by autocast: 4 bytes each for the weight, its gradient and both moments.
constexpr int64_t kBytes = 4;

struct Stage {
  int64_t parameters = 0;  // of one rank
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
};

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
  value.set("weights_bytes", kBytes * stage.parameters);
  value.set("gradients_bytes", kBytes * stage.parameters);
  value.set("optimizer_bytes", 2 * kBytes * stage.parameters);
  value.set("total_bytes", 4 * kBytes * stage.parameters);
  return value;
}

}  // namespace

int run_plan(const Arguments& arguments) {
  CommandLine line(
      "plan",
      "What each rank would hold, from a config.json alone: the partition over stages, parameters and bytes\n"
      "(fp32 weights, gradients and AdamW moments; activations come on top), and a checkpoint's size.");
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
  const ModelCosts costs = model_costs(model, options.memory_weight);
  const Partition partition = make_partition(costs.costs, options.pp);
  const double even = balance(costs.costs, partition);

  std::vector<Stage> stages;
  for (int s = 0; s < partition.stages(); ++s) {
    stages.push_back({parameters_of(model, stage_tensors(model, partition, s), options.tp), stage_ranks(mesh, s)});
  }
  int64_t parameters = 0;
  for (const auto& tensor : model.tensors) parameters += volume(tensor.shape);
  // A tied tensor stands in it once; two moments beside each weight.
  const int64_t checkpoint = 3 * kBytes * parameters;

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
  Table table({false, false, false, true, true, true, true, true});
  table.add({bold("STAGE"), bold("HOLDS"), bold("RANKS"), bold("PARAMETERS"), bold("WEIGHTS"), bold("GRADIENTS"),
             bold("ADAMW"), bold("A RANK")});
  for (int s = 0; s < partition.stages(); ++s) {
    const Stage& stage = stages[s];
    std::string ranks;
    for (const auto& slice : stage.ranks) ranks += (ranks.empty() ? "" : ", ") + slice;
    const auto bytes = static_cast<uint64_t>(kBytes * stage.parameters);
    table.add({std::to_string(s), stage_words(partition, s), ranks, human_count(stage.parameters), human_bytes(bytes),
               human_bytes(bytes), human_bytes(2 * bytes), human_bytes(4 * bytes)});
  }
  std::cout << table.text("") << "\nbalance " << static_cast<int>(100 * even + 0.5)
            << " % (the mean stage over the costliest); a checkpoint takes about "
            << human_bytes(static_cast<uint64_t>(checkpoint)) << "\n";
  return 0;
}

}  // namespace shardsmith::cli
