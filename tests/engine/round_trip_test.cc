// Worlds of 8 and 12 ranks, as threads: saved in one layout, resumed in another, the same bits under logical names, and
// training goes on as if there had been no break.
#include <ATen/Functions.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

#include "base/error.h"
#include "checkpoint/load.h"
#include "checkpoint/save.h"
#include "optim/adamw.h"
#include "storage/transfer.h"
#include "support.h"

namespace shardsmith::test {
namespace {

constexpr int64_t kSamples = 24;  // of a global batch: 1, 2, 3 and 4 replicas deal them out in two microbatches each
constexpr int kBefore = 2, kAfter = 10;
const char* const kState = "optimizer/state/";

struct Degrees {
  int pp, tp, rdp;
  std::string text() const { return str("pp ", pp, ", tp ", tp, ", rdp ", rdp); }
};

// A part of a logical tensor that this rank holds: a view of `shape` box.extent.
struct Part {
  std::string name;  // in the checkpoint
  Shape whole;
  Box box;
  at::Tensor view;
  bool is_stored;  // here, and by no other rank
};

class Rank {
 public:
  Rank(const FamilyModel& model, const Mesh& mesh, int rank, StageOptions options, const Tensors& weights)
      : model_(model),
        at_(mesh.coordinates(rank)),
        mesh_(mesh),
        partition_(options.partition),
        local_(local_weights(model, weights, partition_, at_.pp, at_.tp, mesh.tp_size())),
        stage_(model, Parameters(model, local_, at_.tp, mesh.tp_size()), std::move(options)),
        optimizer_({{values(local_), 1e-2}}) {}

  // The mean loss of this replica's samples.
  double step(int number) {
    const int64_t own = kSamples / mesh_.rdp_size(), rows = own / 2;
    const std::vector<Inputs> all = batch(1, kSamples, 16, 61, static_cast<uint64_t>(100 + number));
    std::vector<Inputs> microbatches(2);
    for (int64_t m = 0; m < 2; ++m) {
      Inputs& inputs = microbatches[static_cast<size_t>(m)];
      inputs.input_ids = inputs.labels = all[0].input_ids.narrow(0, at_.rdp * own + m * rows, rows);
    }
    Stage::Step step{static_cast<uint64_t>(number), 2, true, true, static_cast<uint64_t>(at_.rdp * own)};
    const std::vector<at::Tensor> losses = stage_.run_step(step, microbatches);
    stage_.clip_grad_norm(1.0);
    optimizer_.step();
    optimizer_.zero_grad();
    return (losses[0].item<double>() + losses[1].item<double>()) / 2;
  }

  void save(Storage& storage, Peers& peers, const std::string& path, int64_t steps) {
    SaveFile weights{str("model_", at_.pp, "_", at_.tp, ".pt"), {}, false};
    SaveFile moments{str("optimizer_", at_.pp, "_", at_.tp, ".pt"), {}, false};
    std::vector<at::Tensor> keep;
    Value by_name;
    for (const Part& part : parts()) {
      if (!part.is_stored) continue;
      const bool is_weight = part.name.starts_with("model/");
      const TensorRef tensor = add((is_weight ? weights : moments).content, part, keep);
      if (is_weight) {
        weights.content.value.set(part.name.substr(6), tensor);
        continue;
      }
      const std::string name = part.name.substr(std::strlen(kState));
      const size_t slash = name.rfind('/');
      Value entries = by_name.find(name.substr(0, slash)) ? *by_name.find(name.substr(0, slash)) : Value();
      entries.set(name.substr(slash + 1), tensor);
      by_name.set(name.substr(0, slash), entries);
    }
    moments.content.value.set("state", by_name);
    moments.content.value.set("param_groups", List{});
    SaveRequest request;
    request.path = path;
    request.tag = "t";
    request.manifest.step = steps;
    request.manifest.world_size = mesh_.world_size();
    request.manifest.pp = mesh_.pp_size(), request.manifest.tp = mesh_.tp_size(),
    request.manifest.rdp = mesh_.rdp_size();
    request.manifest.partition = partition_;
    if (at_.rdp == 0) request.files = {std::move(weights), std::move(moments)};
    request.deadline = std::chrono::seconds(60);
    save_partial(storage, peers, request);
  }

  // Each reads its own boxes.
  void resume(Storage& storage, const Index& index, int64_t steps) {
    make_states(steps);
    const std::vector<Part> own = parts();
    Target target;
    std::vector<at::Tensor> buffers;
    std::vector<Destination> destinations;
    for (const Part& part : own) {
      buffers.push_back(at::empty(part.view.sizes(), part.view.options()));
      const Dtype dtype = dtype_of(part.view);
      target.wants.push_back({part.name, dtype, part.whole, part.box, static_cast<uint32_t>(destinations.size()), 0,
                              contiguous_strides(part.box.extent)});
      destinations.push_back({{static_cast<std::byte*>(buffers.back().data_ptr()), buffers.back().nbytes()}});
    }
    const Plan plan = make_plan(index, target);
    require_complete(plan, "the checkpoint");
    execute(plan, index, destinations, storage, {.threads = 1});
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < own.size(); ++i) own[i].view.copy_(buffers[i]);
  }

 private:
  static std::vector<at::Tensor> values(const Tensors& tensors) {
    std::vector<at::Tensor> result;
    for (const auto& [name, tensor] : tensors) result.push_back(tensor);
    return result;
  }
  static Dtype dtype_of(const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kBFloat16 ? Dtype::kBF16 : Dtype::kF32;
  }

  // As AdamW itself does at the first step.
  void make_states(int64_t steps) {
    const std::vector<at::Tensor> parameters = values(local_);
    for (size_t i = 0; i < parameters.size(); ++i) {
      AdamW::State& state = optimizer_.states()[0][i];
      const at::Tensor wide = parameters[i].detach().to(at::kFloat);
      if (parameters[i].scalar_type() != at::kFloat) state.master = wide.clone();
      state.exp_avg = at::empty_like(wide), state.exp_avg_sq = at::empty_like(wide);
      state.step = at::full({}, static_cast<double>(steps), at::kFloat);
    }
  }

  std::vector<Part> parts() {
    std::vector<Part> result;
    const FamilyModel own = local_model(model_, at_.tp, mesh_.tp_size());
    for (const size_t t : stage_tensors(model_, partition_, at_.pp)) {
      const FamilyTensor& tensor = model_.tensors[t];
      const auto found = local_.find(tensor.hf_name);
      AdamW::State& state = optimizer_.states()[0][static_cast<size_t>(std::distance(local_.begin(), found))];
      for (size_t p = 0; p < tensor.pieces.size(); ++p) {
        const Piece& piece = tensor.pieces[p];
        const Box box = tensor_parallel_box(model_.description, piece.name, piece.shape, at_.tp, mesh_.tp_size());
        const int copies = tensor_parallel_copies(model_.description, piece.name, piece.shape, mesh_.tp_size());
        const bool is_stored = at_.tp % copies == 0 && !(tensor.also_last && at_.pp > 0);
        const auto add = [&](const std::string& name, const at::Tensor& like) {
          if (like.defined())
            result.push_back({name, piece.shape, box, piece_of(like.detach(), own.tensors[t].pieces[p]), is_stored});
        };
        add("model/" + piece.name, found->second);
        add(kState + piece.name + "/exp_avg", state.exp_avg);
        add(kState + piece.name + "/exp_avg_sq", state.exp_avg_sq);
        add(kState + piece.name + "/master", state.master);
      }
    }
    return result;
  }

  static TensorRef add(PtContent& content, const Part& part, std::vector<at::Tensor>& keep) {
    keep.push_back(part.view.contiguous());
    PtTensor tensor;
    tensor.dtype = dtype_of(keep.back());
    tensor.storage = content.storages.size();
    tensor.size = part.box.extent;
    tensor.strides = contiguous_strides(part.box.extent);
    tensor.name = part.name;
    tensor.global = part.whole;
    tensor.box = part.box;
    content.tensors.push_back(tensor);
    content.storages.push_back({keep.back().nbytes(), static_cast<const std::byte*>(keep.back().data_ptr()), {}});
    return {content.tensors.size() - 1};
  }

  const FamilyModel& model_;
  Coordinates at_;
  const Mesh& mesh_;
  Partition partition_;
  Tensors local_;
  Stage stage_;
  AdamW optimizer_;
};

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "shardsmith-round-trip-XXXXXX").string();
    if (!::mkdtemp(pattern.data())) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~Folder() {
    std::error_code none;
    std::filesystem::remove_all(path_, none);
  }
  Folder(const Folder&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

// Trains from the beginning and saves in `path`, or goes on from `resumed` and saves what it has read at once. Returns
// the mean losses of the steps after the save.
std::vector<double> run(const FamilyModel& model, at::ScalarType dtype, Degrees degrees, const std::string& path,
                        const std::string& resumed = "") {
  const Mesh mesh(degrees.pp * degrees.tp * degrees.rdp, degrees.pp, degrees.tp);
  const Partition partition = make_partition(model_costs(model, 0.5, 16).costs, degrees.pp);
  const Tensors weights = initial_weights(model, dtype);
  Worlds pipelines, replicas, slices;
  std::vector<StageOptions> options;
  for (int rank = 0; rank < mesh.world_size(); ++rank)
    options.push_back({.partition = partition,
                       .stage = mesh.coordinates(rank).pp,
                       .pipeline = pipelines.group(mesh.pp_group(rank), rank, "pipeline group"),
                       .replicas = replicas.group(mesh.rdp_group(rank), rank, "data-parallel group"),
                       .tensor = slices.group(mesh.tp_group(rank), rank, "tensor-parallel group"),
                       .split_sequence = degrees.tp > 1,
                       .seed = 11,
                       .bucket_cap_mb = 0.01});
  auto peers = make_thread_peers(mesh.world_size());
  std::vector<double> losses(kAfter);
  std::mutex mutex;
  run_ranks(mesh.world_size(), [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    Rank self(model, mesh, rank, options[r], weights);
    Storage& storage = local_storage();
    if (resumed.empty()) {
      for (int i = 0; i < kBefore; ++i) self.step(i);
    } else {
      const std::string folder = resumed + "/t_partial";
      self.resume(storage, read_partial(storage, folder, read_manifest(storage, folder)), kBefore);
    }
    self.save(storage, *peers[r], path, kBefore);
    for (int i = 0; i < kAfter; ++i) {
      const double loss = self.step(kBefore + i);
      const Coordinates at = mesh.coordinates(rank);
      std::lock_guard lock(mutex);
      if (at.pp == 0 && at.tp == 0) losses[static_cast<size_t>(i)] += loss / mesh.rdp_size();
    }
  });
  return losses;
}

// Whole tensors by name, as bytes.
std::map<std::string, std::string> read_all(const std::string& path) {
  Storage& storage = local_storage();
  const std::string folder = path + "/t_partial";
  const Manifest manifest = read_manifest(storage, folder);
  EXPECT_EQ(verify_partial(storage, folder, manifest), std::vector<std::string>{});
  const Index index = read_partial(storage, folder, manifest);
  std::map<std::string, std::string> result;
  Target target;
  std::vector<Destination> destinations;
  for (const TensorEntry& entry : index.tensors) {
    std::string& bytes = result[entry.name];
    bytes.resize(static_cast<size_t>(volume(entry.shape) * size_of(entry.dtype)));
    target.wants.push_back({entry.name, entry.dtype, entry.shape, whole(entry.shape),
                            static_cast<uint32_t>(destinations.size()), 0, contiguous_strides(entry.shape)});
    destinations.push_back({std::as_writable_bytes(std::span(bytes))});
  }
  const Plan plan = make_plan(index, target);
  require_complete(plan, folder);
  execute(plan, index, destinations, storage, {.threads = 1});
  return result;
}

class RoundTrips : public testing::TestWithParam<at::ScalarType> {};

TEST_P(RoundTrips, OfEightAndTwelveRanksGoOnInAnyLayout) {
  const bool narrow = GetParam() == at::kBFloat16;
  std::vector<Degrees> all = {{2, 2, 2}, {3, 4, 1}, {4, 1, 2}, {1, 4, 3}, {3, 2, 2}, {1, 2, 4}, {4, 1, 3}};
  const bool is_long = std::getenv("SHARDSMITH_LONG");
  if (!is_long) all.resize(narrow ? 2 : 4);
  const FamilyModel model = family(kTinyGpt2);
  Folder folder;
  std::vector<std::vector<double>> losses;
  for (size_t i = 0; i < all.size(); ++i)
    losses.push_back(run(model, GetParam(), all[i], folder / ("saved" + std::to_string(i))));
  for (size_t i = 0; i < all.size(); ++i) {
    for (const size_t j : {i, (i + 1) % all.size()}) {
      if (i == j && i > 0 && !is_long) continue;
      SCOPED_TRACE("saved with " + all[i].text() + ", resumed with " + all[j].text());
      const std::string from = folder / ("saved" + std::to_string(i)), to = folder / str("again", i, "_", j);
      const std::vector<double> found = run(model, GetParam(), all[j], to, from);
      const auto saved = read_all(from), again = read_all(to);
      EXPECT_GT(saved.size(), narrow ? 250u : 180u);
      ASSERT_EQ(saved.size(), again.size());
      for (const auto& [name, bytes] : saved) EXPECT_TRUE(bytes == again.at(name)) << name;
      for (size_t step = 0; step < found.size(); ++step) {
        if (i == j) EXPECT_EQ(found[step], losses[i][step]) << "step " << step;
        // Sums in another order: roundings of 2^-24, or 2^-8 where activations are bfloat16.
        else
          EXPECT_NEAR(found[step], losses[i][step], losses[i][step] * (narrow ? 0x1p-8 : 0x1p-20)) << "step " << step;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, RoundTrips, testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(at::toString(info.param)); });

}  // namespace
}  // namespace shardsmith::test
