// For tests of the command line: a Hugging Face folder -> a partial checkpoint of its weights, with AdamW moments made
// of them (exp_avg = the weight, exp_avg_sq = the weight's bytes too), saved by ranks that are threads.
//
//   make_partial HF_DIR OUT TAG STEP PP RDP [KEEP]
#include <cstdlib>
#include <deque>
#include <exception>
#include <iostream>
#include <mutex>
#include <set>
#include <thread>

#include "base/error.h"
#include "checkpoint/save.h"
#include "family/family.h"
#include "format/hf.h"
#include "layout/plan.h"
#include "storage/transfer.h"

using namespace shardsmith;

namespace {

struct Job {
  Index logical;
  FamilyModel model;
  Partition partition;
  SaveRequest request;  // the same on all ranks but for the files
};

// What one stage holds, in memory that lives as long as the deque.
std::vector<SaveFile> stage_files(const Job& job, int stage, std::deque<std::vector<std::byte>>& memory) {
  Target target;
  std::vector<Destination> destinations;
  PtContent model, optimizer;
  Value model_dict = Dict{}, state = Dict{};
  for (const size_t i : stage_tensors(job.model, job.partition, stage)) {
    const FamilyTensor& tensor = job.model.tensors[i];
    if (tensor.also_last && stage > 0 && stage + 1 == job.partition.stages()) continue;  // tied: stored by the first
    for (const auto& piece : tensor.pieces) {
      const Dtype dtype = job.logical.find(piece.name)->dtype;
      const uint64_t bytes = static_cast<uint64_t>(volume(piece.shape) * size_of(dtype));
      auto& buffer = memory.emplace_back(bytes);
      const Box box = whole(piece.shape);
      const Strides strides = contiguous_strides(piece.shape);
      target.wants.push_back(
          {piece.name, dtype, piece.shape, box, static_cast<uint32_t>(destinations.size()), 0, strides});
      destinations.push_back({buffer});
      PtTensor entry{dtype, model.storages.size(), 0,           piece.shape, strides,
                     false, "model/" + piece.name, piece.shape, box};
      model_dict.set(piece.name, TensorRef{model.tensors.size()});
      model.tensors.push_back(entry);
      model.storages.push_back({bytes, buffer.data(), {}});
      Value moments;
      for (const char* moment : {"exp_avg", "exp_avg_sq"}) {
        entry.name = "optimizer/state/" + piece.name + "/" + moment;
        entry.storage = optimizer.storages.size();
        moments.set(moment, TensorRef{optimizer.tensors.size()});
        optimizer.tensors.push_back(entry);
        optimizer.storages.push_back({bytes, buffer.data(), {}});
      }
      state.set(piece.name, moments);
    }
  }
  const Plan plan = make_plan(job.logical, target);
  require_complete(plan, "make_partial");
  execute(plan, job.logical, destinations, local_storage());

  model.value = model_dict;
  optimizer.value.set("state", state);
  optimizer.value.set("param_groups", List{});
  return {{str("model_", stage, "_0.pt"), std::move(model)}, {str("optimizer_", stage, "_0.pt"), std::move(optimizer)}};
}

void save_rank(const Job& job, const Mesh& mesh, Peers& peers) {
  std::deque<std::vector<std::byte>> memory;
  SaveRequest request = job.request;
  const Coordinates at = mesh.coordinates(peers.rank());
  if (at.rdp == 0) request.files = stage_files(job, at.pp, memory);
  if (peers.rank() == 0) {
    PtContent user;
    user.value = parse_json(R"({"epoch": 1, "note": "made for a test"})", "make_partial");
    request.files.push_back({"user_content.pt", std::move(user)});
  }
  save_partial(local_storage(), peers, request);
}

int run(int argc, char** argv) {
  if (argc < 7) fail(ErrorKind::kInvalidArgument, "make_partial HF_DIR OUT TAG STEP PP RDP [KEEP]");
  const std::string hf = argv[1];
  const int pp = std::atoi(argv[5]), rdp = std::atoi(argv[6]);
  Job job;
  const Value config = read_hf_config(local_storage(), hf);
  job.model = describe_model(config);
  job.logical = to_logical(read_hf(local_storage(), hf), job.model);
  job.partition = make_partition(model_costs(job.model, 0.8).costs, pp);
  job.request.path = argv[2];
  job.request.tag = argv[3];
  if (argc > 7) job.request.num_kept_partial_checkpoints = std::atoi(argv[7]);
  Manifest& manifest = job.request.manifest;
  manifest.step = std::atoi(argv[4]);
  manifest.world_size = pp * rdp;
  manifest.pp = pp;
  manifest.rdp = rdp;
  manifest.partition = job.partition;
  manifest.model_config = config;
  manifest.hf = "hf";

  const Mesh mesh(pp * rdp, pp, 1);
  auto peers = make_thread_peers(pp * rdp);
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::exception_ptr error;
  for (auto& peer : peers) {
    threads.emplace_back([&, rank = peer.get()] {
      try {
        save_rank(job, mesh, *rank);
      } catch (...) {
        std::lock_guard lock(mutex);
        error = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const Error& e) {
    std::cerr << e.what() << "\n";
    return exit_code(e.kind());
  }
}
