// Small checkpoints whose every byte depends on (seed, rank, tensor), to be saved, found and compared.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include "base/error.h"
#include "checkpoint/commit.h"
#include "checkpoint/load.h"
#include "checkpoint/save.h"
#include "storage/transfer.h"

namespace shardsmith {

// A state of training on `ranks` pipeline stages: one block each, with its moment and counter, and this rank's random
// state; rank 0 has the user content.
struct TestState {
  std::string tag;
  int64_t step = 0;
  int ranks = 1;
  Shape shape = {8, 33};

  std::string weight(int rank) const { return "transformer.seq_layers." + std::to_string(rank) + ".w"; }
  std::string bytes(const std::string& what, int rank, const Shape& of) const {
    std::string result(static_cast<size_t>(volume(of)) * 4, 0);
    uint64_t state =
        std::hash<std::string>()(what) + static_cast<uint64_t>(step) * 1000003 + static_cast<uint64_t>(rank);
    for (char& c : result)
      c = static_cast<char>((state = state * 6364136223846793005ull + 1442695040888963407ull) >> 56);
    return result;
  }
};

// What a rank saves; owns the bytes.
struct RankFiles {
  RankFiles(const TestState& state, int rank, const std::string& path) {
    request.path = path;
    request.tag = state.tag;
    request.manifest.step = state.step;
    request.manifest.world_size = request.manifest.pp = state.ranks;
    for (int s = 0; s <= state.ranks; ++s) request.manifest.partition.first.push_back(s);
    request.deadline = std::chrono::seconds(20);
    const std::string at = std::to_string(rank) + "_0.pt", name = state.weight(rank);
    // model: {name: tensor}
    SaveFile model{"model_" + at, {}};
    model.content.value.set(name, add(model, state.bytes("weight", rank, state.shape), state, rank, "model/" + name));
    // optimizer: {"state": {name: {"exp_avg": tensor, "step": number}}, "param_groups": [...]}
    SaveFile optimizer{"optimizer_" + at, {}};
    Value moments, by_name, groups;
    moments.set("exp_avg", add(optimizer, state.bytes("moment", rank, state.shape), state, rank,
                               "optimizer/state/" + name + "/exp_avg"));
    moments.set("step", state.step);
    by_name.set(name, moments);
    groups.set("lr", 0.5);
    optimizer.content.value.set("state", by_name);
    optimizer.content.value.set("param_groups", List{groups});
    SaveFile rng{"rng_" + std::to_string(rank) + ".pt", {}};
    rng.content.value.set("seed", state.step * 10 + rank);
    request.files = {std::move(model), std::move(optimizer), std::move(rng)};
    if (rank == 0) {
      SaveFile user{"user_content.pt", {}};
      user.content.value.set("note", "step " + std::to_string(state.step));
      request.files.push_back(std::move(user));
    }
  }
  RankFiles(const RankFiles&) = delete;

  SaveRequest request;

 private:
  TensorRef add(SaveFile& file, std::string bytes, const TestState& state, int, const std::string& name) {
    bytes_.push_back(std::make_unique<std::string>(std::move(bytes)));
    const std::string& kept = *bytes_.back();
    PtTensor tensor;
    tensor.size = tensor.global = state.shape;
    tensor.strides = contiguous_strides(state.shape);
    tensor.storage = file.content.storages.size();
    tensor.name = name;
    tensor.box = whole(state.shape);
    file.content.tensors.push_back(tensor);
    file.content.storages.push_back({kept.size(), reinterpret_cast<const std::byte*>(kept.data()), {}});
    return {file.content.tensors.size() - 1};
  }
  std::vector<std::unique_ptr<std::string>> bytes_;
};

// What became of a save: per rank a result or an error.
struct SaveOutcome {
  std::vector<std::optional<SaveResult>> results;
  std::vector<std::optional<Error>> errors;
  bool power_cut = false;
  bool succeeded() const {
    return std::all_of(results.begin(), results.end(), [](const auto& r) { return r.has_value(); });
  }
};

// Runs `work` with one thread a rank, each with peers of its own that are gone when it ends.
inline SaveOutcome on_threads(int count, const std::function<SaveResult(int rank, Peers&)>& work) {
  SaveOutcome outcome;
  const auto ranks = static_cast<size_t>(count);
  outcome.results.resize(ranks);
  outcome.errors.resize(ranks);
  auto peers = make_thread_peers(count);
  std::vector<std::thread> threads;
  std::mutex mutex;
  for (size_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      std::unique_ptr<Peers> mine = std::move(peers[r]);
      try {
        SaveResult result = work(static_cast<int>(r), *mine);
        std::lock_guard lock(mutex);
        outcome.results[r] = std::move(result);
      } catch (const Error& e) {
        std::lock_guard lock(mutex);
        outcome.errors[r] = e;
      } catch (...) {
        std::lock_guard lock(mutex);
        outcome.power_cut = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcome;
}

// Saves with one thread a rank. `change` may alter a rank's request.
inline SaveOutcome save(Storage& storage, const TestState& state, const std::string& path,
                        const std::function<void(int rank, SaveRequest&)>& change = {}) {
  return on_threads(state.ranks, [&](int rank, Peers& peers) {
    RankFiles files(state, rank, path);
    if (change) change(rank, files.request);
    return save_partial(storage, peers, files.request);
  });
}

// All of a found checkpoint, byte by byte.
inline void expect_whole(Storage& storage, const Found& found, const TestState& state) {
  ASSERT_TRUE(found.manifest);
  ASSERT_EQ(found.manifest->step, state.step);
  ASSERT_EQ(found.manifest->tag, state.tag);
  EXPECT_EQ(verify_partial(storage, found.folder, *found.manifest), std::vector<std::string>{});
  const Index index = read_partial(storage, found.folder, *found.manifest);
  Target target;
  std::vector<std::string> expected, got;
  for (int r = 0; r < state.ranks; ++r) {
    for (const bool moment : {false, true}) {
      expected.push_back(state.bytes(moment ? "moment" : "weight", r, state.shape));
      const std::string name = moment ? "optimizer/state/" + state.weight(r) + "/exp_avg" : "model/" + state.weight(r);
      target.wants.push_back({name, Dtype::kF32, state.shape, whole(state.shape), static_cast<uint32_t>(got.size()), 0,
                              contiguous_strides(state.shape)});
      got.emplace_back(expected.back().size(), '\0');
    }
    const Value* rng = index.values.find("rng_" + std::to_string(r));
    ASSERT_TRUE(rng);
    EXPECT_EQ(*rng->find("seed"), Value(state.step * 10 + r));
  }
  const Plan plan = make_plan(index, target);
  require_complete(plan, found.folder);
  EXPECT_TRUE(plan.report.unexpected.empty());
  std::vector<Destination> destinations;
  for (std::string& bytes : got) destinations.push_back({std::as_writable_bytes(std::span(bytes))});
  execute(plan, index, destinations, storage, {.threads = 1});
  EXPECT_TRUE(got == expected) << "bytes differ in " << found.folder;
  EXPECT_EQ(*index.values.find("user_content")->find("note"), Value("step " + std::to_string(state.step)));
  EXPECT_EQ(index.values.find("optimizer")->get_if<List>()->size(), static_cast<size_t>(state.ranks));
}

// Names in a folder that are no checkpoint, pointer or export folder: what a dead save left.
inline std::vector<std::string> leftovers(Storage& storage, const std::string& path) {
  std::vector<std::string> result;
  for (const std::string& name : storage.list(path)) {
    if (name.starts_with('.')) result.push_back(name);
  }
  return result;
}

// A folder of this test's own, in memory where the machine has a file system there; removed at the end.
class QuickFolder {
 public:
  QuickFolder() {
    namespace fs = std::filesystem;
    std::error_code none;
    const fs::path base = fs::is_directory("/dev/shm", none) ? "/dev/shm" : fs::temp_directory_path();
    std::string pattern = (base / "shardsmith-test-XXXXXX").string();
    if (!::mkdtemp(pattern.data())) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~QuickFolder() {
    std::error_code none;
    std::filesystem::remove_all(path_, none);
  }
  QuickFolder(const QuickFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace shardsmith
