// Small full checkpoints saved by threads: tensors cut by columns (so that ranks need each other's bytes) and by rows,
// and one that all hold; every element is another one, in every step.
#pragma once

#include "base/transport.h"
#include "checkpoint/full.h"
#include "checkpoint/save_full.h"
#include "checkpoint_fixture.h"

namespace shardsmith {

struct FullState {
  std::string tag;
  int64_t step = 0;
  int ranks = 1;
  bool companions = false;

  std::string bytes(const std::string& name, const Shape& shape) const {
    const float first = static_cast<float>(std::hash<std::string>()(name) % 7) + static_cast<float>(step) * 0.25f;
    std::vector<float> values(static_cast<size_t>(volume(shape)));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) + first;
    return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
  }
};

inline const Shape kByColumns = {300, 1200}, kByRows = {400, 600}, kShared = {65};

// Owns what it points at.
class RankSlices {
 public:
  // The part of `whole` that a box is, as a tensor of its own.
  TensorRef add(PtContent& content, const std::string& name, const Shape& shape, const Box& box, std::string bytes) {
    bytes_.push_back(std::make_unique<std::string>(std::move(bytes)));
    PtTensor tensor;
    tensor.storage = content.storages.size();
    tensor.size = box.extent;
    tensor.strides = contiguous_strides(box.extent);
    tensor.name = name;
    tensor.global = shape;
    tensor.box = box;
    content.tensors.push_back(tensor);
    const std::string& kept = *bytes_.back();
    content.storages.push_back({kept.size(), reinterpret_cast<const std::byte*>(kept.data()), {}});
    return {content.tensors.size() - 1};
  }
  // `box` out of a whole float32 tensor.
  static std::string cut(const std::string& whole_bytes, const Shape& shape, const Box& box) {
    const Strides strides = contiguous_strides(shape);
    const int64_t row = box.extent.back(), count = volume(box.extent);
    std::string out(static_cast<size_t>(count) * 4, '\0');
    for (int64_t i = 0; i < count; i += row) {
      int64_t rest = i, place = 0;
      for (size_t d = shape.size(); d-- > 0;) {
        place += (box.offset[d] + rest % box.extent[d]) * strides[d];
        rest /= box.extent[d];
      }
      std::memcpy(out.data() + i * 4, whole_bytes.data() + place * 4, static_cast<size_t>(row) * 4);
    }
    return out;
  }

 private:
  std::vector<std::unique_ptr<std::string>> bytes_;
};

// Rank `rank`'s part of `count` along `dimension`.
inline Box part_of(const Shape& shape, size_t dimension, int rank, int count) {
  Box box = whole(shape);
  const int64_t begin = shape[dimension] * rank / count, end = shape[dimension] * (rank + 1) / count;
  box.offset[dimension] = begin;
  box.extent[dimension] = end - begin;
  return box;
}

struct RankFull {
  RankFull(const FullState& state, int rank, const std::string& path) {
    request.path = path;
    request.tag = state.tag;
    request.manifest.step = state.step;
    request.manifest.world_size = request.manifest.tp = state.ranks;
    request.manifest.partition.first = {0, 0};
    request.deadline = std::chrono::seconds(20);
    request.weights.emplace();
    add(state, *request.weights, "model/", "columns", kByColumns, part_of(kByColumns, 1, rank, state.ranks));
    add(state, *request.weights, "model/", "rows", kByRows, part_of(kByRows, 0, rank, state.ranks));
    add(state, *request.weights, "model/", "shared", kShared, whole(kShared));
    if (!state.companions) return;
    PtContent& optimizer = request.optimizer.emplace();
    Value moments, by_name;
    moments.set("exp_avg", slices.add(optimizer, "optimizer/state/columns/exp_avg", kByColumns,
                                      part_of(kByColumns, 1, rank, state.ranks),
                                      RankSlices::cut(state.bytes("moment", kByColumns), kByColumns,
                                                      part_of(kByColumns, 1, rank, state.ranks))));
    moments.set("step", state.step);
    by_name.set("columns", moments);
    Value group;
    group.set("lr", 0.5);
    group.set("betas", Tuple{{0.9, 0.99}});
    group.set("params", List{"columns", "of rank " + std::to_string(rank)});
    optimizer.value.set("class", "AdamW");
    optimizer.value.set("state", by_name);
    optimizer.value.set("param_groups", List{group});
    if (rank != 0) return;
    request.user_content.emplace();
    request.user_content->value.set("note", "step " + std::to_string(state.step));
  }
  RankFull(const RankFull&) = delete;

  FullRequest request;
  RankSlices slices;

 private:
  void add(const FullState& state, PtContent& content, const std::string& prefix, const std::string& name,
           const Shape& shape, const Box& box) {
    content.value.set(
        name, slices.add(content, prefix + name, shape, box, RankSlices::cut(state.bytes(name, shape), shape, box)));
  }
};

// As on_threads(), each with a transport of its own too.
inline SaveOutcome as_ranks(int count, const std::function<SaveResult(int rank, Peers&, Transport&)>& work) {
  auto transports = make_thread_transports(count);
  return on_threads(count, [&](int rank, Peers& peers) {
    const std::unique_ptr<Transport> mine = std::move(transports[static_cast<size_t>(rank)]);
    return work(rank, peers, *mine);
  });
}

inline SaveOutcome save_whole(Storage& storage, const FullState& state, const std::string& path,
                              const std::function<void(int rank, FullRequest&)>& change = {}) {
  std::vector<std::unique_ptr<RankFull>> ranks;
  for (int r = 0; r < state.ranks; ++r) {
    ranks.push_back(std::make_unique<RankFull>(state, r, path));
    if (change) change(r, ranks.back()->request);
  }
  return as_ranks(state.ranks, [&](int rank, Peers& peers, Transport& transport) {
    return save_full(storage, peers, &transport, ranks[static_cast<size_t>(rank)]->request);
  });
}

inline std::string read_tensor(Storage& storage, const Index& index, const std::string& name) {
  const TensorEntry* entry = index.find(name);
  if (!entry) return "there is no " + name;
  std::string bytes(static_cast<size_t>(volume(entry->shape) * size_of(entry->dtype)), '\0');
  Target target;
  target.wants.push_back(
      {name, entry->dtype, entry->shape, whole(entry->shape), 0, 0, contiguous_strides(entry->shape)});
  const Plan plan = make_plan(index, target);
  const Destination destination{std::as_writable_bytes(std::span(bytes))};
  execute(plan, index, {&destination, 1}, storage, {.threads = 1});
  return bytes;
}

// All of a found full checkpoint, byte by byte.
inline void expect_whole(Storage& storage, const Found& found, const FullState& state) {
  ASSERT_EQ(found.kind, CheckpointKind::kFull);
  ASSERT_TRUE(found.manifest);
  ASSERT_EQ(found.manifest->step, state.step);
  ASSERT_EQ(found.manifest->tag, state.tag);
  const Index index = read_full(storage, found.folder, nullptr);
  EXPECT_TRUE(read_tensor(storage, index, "model/columns") == state.bytes("columns", kByColumns));
  EXPECT_TRUE(read_tensor(storage, index, "model/rows") == state.bytes("rows", kByRows));
  EXPECT_TRUE(read_tensor(storage, index, "model/shared") == state.bytes("shared", kShared));
  if (!state.companions) {
    EXPECT_FALSE(index.values.find("optimizer"));
    EXPECT_FALSE(index.values.find("user_content"));
    return;
  }
  EXPECT_TRUE(read_tensor(storage, index, "optimizer/state/columns/exp_avg") == state.bytes("moment", kByColumns));
  ASSERT_TRUE(index.values.find("user_content"));
  EXPECT_EQ(*index.values.find("user_content")->find("note"), Value("step " + std::to_string(state.step)));
}

}  // namespace shardsmith
