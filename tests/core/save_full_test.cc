#include "checkpoint/save_full.h"

#include <gmock/gmock.h>

#include <random>

#include "family/family.h"
#include "format/zip.h"
#include "full_fixture.h"
#include "memory_storage.h"
#include "storage/faulty_storage.h"

namespace shardsmith {
namespace {

using testing::HasSubstr;

// All ranks failed, with the same words.
std::string error_of(const SaveOutcome& outcome, ErrorKind kind) {
  for (const auto& error : outcome.errors) {
    EXPECT_TRUE(error.has_value());
    if (!error) return "";
    EXPECT_EQ(error->kind(), kind) << error->what();
    EXPECT_STREQ(error->what(), outcome.errors[0]->what());
  }
  return outcome.errors[0]->what();
}

std::string bytes_of(Storage& storage, const std::string& path) {
  const auto file = storage.open_read(path);
  std::string bytes(file->size(), '\0');
  file->read(0, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

// What both say must be the same: all but who wrote it when.
void expect_same_file(Storage& storage, const std::string& a, const std::string& b) {
  const PtRecord left = read_pt_record(storage, a), right = read_pt_record(storage, b);
  ASSERT_EQ(left.checksums->covered, right.checksums->covered);
  EXPECT_EQ(left.checksums->crc, right.checksums->crc);
  const uint64_t covered = left.checksums->covered;
  EXPECT_TRUE(bytes_of(storage, a).substr(0, covered) == bytes_of(storage, b).substr(0, covered));
  // The directory, which has every record's CRC-32.
  const auto crcs = [&](const std::string& path) {
    std::vector<std::pair<std::string, uint32_t>> result;
    const auto file = storage.open_read(path);
    for (const ZipRecord& record : read_zip(*file)) {
      if (!record.name.ends_with("/shardsmith")) result.emplace_back(record.name, record.crc);
      if (!record.name.ends_with("/shardsmith")) read_record(*file, record, 1 << 30);  // matches its checksum
    }
    return result;
  };
  EXPECT_EQ(crcs(a), crcs(b));
}

// A random model, cut into random boxes that random ranks hold.
struct RandomModel {
  struct Tensor {
    std::string name;
    Dtype dtype;
    Shape shape;
    std::string bytes;
    std::vector<std::pair<Box, std::vector<int>>> parts;
  };
  std::vector<Tensor> tensors;

  RandomModel(std::mt19937& random, int ranks, int64_t most_elements) {
    const size_t count = 1 + random() % 6;
    for (size_t t = 0; t < count; ++t) {
      Tensor tensor;
      tensor.name = "t" + std::to_string(t);
      tensor.dtype = std::vector{Dtype::kF32, Dtype::kBF16, Dtype::kU8, Dtype::kF64}[random() % 4];
      const size_t dims = random() % 4;
      int64_t room = 1 + static_cast<int64_t>(random()) % most_elements;
      for (size_t d = 0; d < dims; ++d) {
        const int64_t extent = d + 1 == dims ? room : 1 + static_cast<int64_t>(random()) % std::min<int64_t>(room, 64);
        tensor.shape.push_back(extent);
        room = std::max<int64_t>(1, room / extent);
      }
      const size_t bytes = static_cast<size_t>(volume(tensor.shape) * size_of(tensor.dtype));
      for (size_t i = 0; i < bytes; ++i) tensor.bytes += static_cast<char>((i * 2654435761u + t * 97) >> 11);
      cut(random, tensor, whole(tensor.shape), ranks, 0);
      tensors.push_back(std::move(tensor));
    }
  }

  void cut(std::mt19937& random, Tensor& tensor, const Box& box, int ranks, int depth) {
    const size_t d = box.extent.empty() ? 0 : random() % box.extent.size();
    if (depth < 3 && !box.extent.empty() && box.extent[d] > 1 && random() % 3) {
      const int64_t at = 1 + static_cast<int64_t>(random()) % (box.extent[d] - 1);
      Box low = box, high = box;
      low.extent[d] = at;
      high.offset[d] += at;
      high.extent[d] -= at;
      cut(random, tensor, low, ranks, depth + 1);
      cut(random, tensor, high, ranks, depth + 1);
      return;
    }
    std::vector<int> holders;
    for (int r = 0; r < ranks; ++r)
      if (random() % 3 == 0) holders.push_back(r);
    if (holders.empty()) holders.push_back(static_cast<int>(random() % static_cast<unsigned>(ranks)));
    tensor.parts.emplace_back(box, std::move(holders));
  }
};

TEST(SaveFull, RandomLayoutsGiveTheBytesThatOneProcessWrites) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 40; ++trial) {
    const int ranks = 1 + trial % 4;
    SCOPED_TRACE(str("trial ", trial, ", ", ranks, " ranks"));
    const RandomModel model(random, ranks, trial % 3 ? 400'000 : 3000);
    MemoryStorage storage;
    storage.make_directory("out");
    storage.make_directory("one");
    FullContent one;
    RankSlices slices;
    std::vector<std::unique_ptr<FullRequest>> requests;
    for (int r = 0; r < ranks; ++r) {
      auto request = std::make_unique<FullRequest>();
      request->path = "out";
      request->tag = "m";
      request->manifest.partition.first = {0, 0};
      request->weights.emplace();
      requests.push_back(std::move(request));
    }
    // Names come in the order of the ranks that hold them first.
    std::vector<std::string> order;
    for (int r = 0; r < ranks; ++r) {
      PtContent& content = *requests[static_cast<size_t>(r)]->weights;
      for (const RandomModel::Tensor& tensor : model.tensors) {
        for (const auto& [box, holders] : tensor.parts) {
          if (!std::count(holders.begin(), holders.end(), r)) continue;
          // In the memory of a larger tensor, with odd strides: transposed.
          const int64_t size = size_of(tensor.dtype);
          std::string held(static_cast<size_t>(volume(box.extent) * size), '\0');
          Strides strides(box.extent.size());
          int64_t step = 1;
          for (size_t d = 0; d < strides.size(); ++d) strides[d] = step, step *= std::max<int64_t>(box.extent[d], 1);
          const Strides of_whole = contiguous_strides(tensor.shape);
          for (int64_t i = 0; i < volume(box.extent); ++i) {
            int64_t rest = i, from = 0, to = 0;
            for (size_t d = box.extent.size(); d-- > 0;) {
              from += (box.offset[d] + rest % box.extent[d]) * of_whole[d];
              to += rest % box.extent[d] * strides[d];
              rest /= box.extent[d];
            }
            std::memcpy(held.data() + to * size, tensor.bytes.data() + from * size, static_cast<size_t>(size));
          }
          const TensorRef reference = slices.add(content, "model/" + tensor.name, tensor.shape, box, std::move(held));
          content.tensors.back().dtype = tensor.dtype;
          content.tensors.back().strides = strides;
          content.value.set(tensor.name, reference);
          if (!std::count(order.begin(), order.end(), tensor.name)) order.push_back(tensor.name);
        }
      }
      // Tensors of several boxes stand once in a dict: the first reference is replaced, the others must not be lost.
      Value tree;
      for (size_t i = 0; i < content.tensors.size(); ++i) tree.set(content.tensors[i].name.substr(6), TensorRef{i});
      content.value = tree;
    }
    for (const std::string& name : order) {
      for (const RandomModel::Tensor& tensor : model.tensors) {
        if (tensor.name != name) continue;
        const TensorRef reference = slices.add(one.weights, "", tensor.shape, whole(tensor.shape), tensor.bytes);
        one.weights.tensors.back().dtype = tensor.dtype;
        one.weights.value.set(name, reference);
      }
    }
    const SaveOutcome outcome = as_ranks(ranks, [&](int rank, Peers& peers, Transport& transport) {
      return save_full(storage, peers, &transport, *requests[static_cast<size_t>(rank)]);
    });
    for (const auto& error : outcome.errors) ASSERT_FALSE(error) << error->what();
    Manifest manifest;
    manifest.tag = "m";
    manifest.partition.first = {0, 0};
    write_full(storage, "one/m", manifest, one);
    expect_same_file(storage, "out/m", "one/m");
    EXPECT_EQ(bytes_of(storage, "out/m").size(), outcome.results[0]->bytes);
    if (HasFatalFailure()) return;
  }
}

TEST(SaveFull, HasItsCompanionsAndIsFound) {
  for (const int ranks : {1, 2, 3}) {
    MemoryStorage storage;
    const FullState state{"model.pt", 5, ranks, true};
    const SaveOutcome outcome = save_whole(storage, state, "out");
    for (const auto& error : outcome.errors) ASSERT_FALSE(error) << error->what();
    EXPECT_EQ(outcome.results[0]->folder, "out/model.pt");
    EXPECT_EQ(storage.list("out"),
              (std::vector<std::string>{"model.pt", "newest", "optimizer_model.pt", "user_content_model.pt"}));
    EXPECT_EQ(read_text(storage, "out/newest"), "model.pt\n");
    uint64_t bytes = 0;
    for (const std::string& file : full_files("out/model.pt")) bytes += storage.stat(file).size;
    EXPECT_EQ(outcome.results[0]->bytes, bytes);
    const auto found = find_checkpoint(storage, "out", "", nullptr, CheckpointKind::kFull);
    ASSERT_TRUE(found);
    EXPECT_TRUE(found->newest);
    EXPECT_EQ(found->bytes, bytes);
    expect_whole(storage, *found, state);
    // Values are merged: what is each rank's own is joined, a tuple stays one.
    const Index index = read_full(storage, found->folder, nullptr);
    const Value& group = (*index.values.find("optimizer")->find("param_groups")->get_if<List>())[0];
    EXPECT_EQ(group.find("params")->get_if<List>()->size(), static_cast<size_t>(ranks) + 1);
    EXPECT_EQ(*group.find("betas"), Value(Tuple{{0.9, 0.99}}));
    EXPECT_EQ(*index.values.find("optimizer")->find("state")->find("columns")->find("step"), Value(5));
  }
}

TEST(SaveFull, ARankHoldsAndWritesOnlyItsShare) {
  // Counts what each rank writes into the one file.
  class Counting final : public ForwardingStorage {
   public:
    using ForwardingStorage::ForwardingStorage;
    std::map<std::thread::id, uint64_t> written;
    std::mutex mutex;
    std::unique_ptr<WriteFile> open_write(const std::string& path, Access access) override {
      return std::make_unique<File>(base.open_write(path, access), *this);
    }

   private:
    class File final : public WriteFile {
     public:
      File(std::unique_ptr<WriteFile> base, Counting& owner)
          : base_(std::move(base)), owner_(owner), opener_(std::this_thread::get_id()) {}
      void write(uint64_t offset, std::span<const std::byte> bytes) override {
        {
          std::lock_guard lock(owner_.mutex);
          owner_.written[opener_] += bytes.size();
        }
        EXPECT_TRUE(bytes.size() < 65536 || offset % (1 << 20) == 0) << bytes.size() << " at " << offset;
        base_->write(offset, bytes);
      }
      void truncate(uint64_t size) override { base_->truncate(size); }
      void sync() override { base_->sync(); }
      void close() override { base_->close(); }
      const std::string& path() const override { return base_->path(); }

     private:
      std::unique_ptr<WriteFile> base_;
      Counting& owner_;
      std::thread::id opener_;
    };
  };
  MemoryStorage memory;
  Counting storage(memory);
  const SaveOutcome outcome = save_whole(storage, {"m", 1, 2, false}, "out");
  ASSERT_TRUE(outcome.succeeded());
  ASSERT_EQ(storage.written.size(), 2u);
  uint64_t sum = 0;
  for (const auto& [thread, bytes] : storage.written) {
    EXPECT_GE(bytes, 300'000u);
    sum += bytes;
  }
  // Nothing twice, but for a descriptor that had to wait for the others' checksums.
  EXPECT_GE(sum, outcome.results[0]->bytes);
  EXPECT_LE(sum, outcome.results[0]->bytes + 200);
}

TEST(SaveFull, OnSeveralMachinesOnlyThoseOfTheFirstWriteTheFile) {
  MemoryStorage storage;
  const FullState state{"m", 1, 3, true};
  const SaveOutcome outcome = save_whole(
      storage, state, "out", [](int rank, FullRequest& request) { request.host = rank == 1 ? "another" : "one"; });
  for (const auto& error : outcome.errors) ASSERT_FALSE(error) << error->what();
  expect_whole(storage, *find_checkpoint(storage, "out", "m", nullptr, CheckpointKind::kFull), state);
}

TEST(SaveFull, ReplicasNeedNoTransport) {
  MemoryStorage storage;
  const FullState state{"m", 1, 1, true};
  std::vector<std::unique_ptr<RankFull>> ranks;
  for (int r = 0; r < 2; ++r) ranks.push_back(std::make_unique<RankFull>(state, 0, "out"));
  const SaveOutcome outcome = as_ranks(2, [&](int rank, Peers& peers, Transport&) {
    return save_full(storage, peers, nullptr, ranks[static_cast<size_t>(rank)]->request);
  });
  for (const auto& error : outcome.errors) ASSERT_FALSE(error) << error->what();
  expect_whole(storage, *find_checkpoint(storage, "out", "m", nullptr, CheckpointKind::kFull), state);
  // Columns can't do without.
  EXPECT_THAT(error_of(as_ranks(2,
                                [&](int rank, Peers& peers, Transport&) {
                                  RankFull full({"m", 2, 2, false}, rank, "out");
                                  return save_full(storage, peers, nullptr, full.request);
                                }),
                       ErrorKind::kInvalidArgument),
              HasSubstr("nothing that moves bytes"));
}

TEST(SaveFull, ContradictionsAreNamedBeforeAnythingIsWritten) {
  struct Case {
    std::function<void(FullRequest&)> change;
    const char* text;
  };
  const Case cases[] = {
      {[](FullRequest& r) { r.tag = "other"; }, "rank 1 saves tag \"other\" but rank 0 saves tag \"m\""},
      {[](FullRequest& r) { r.path = "elsewhere"; }, "rank 1 saves path \"elsewhere\""},
      {[](FullRequest& r) { r.manifest.step = 7; }, "rank 1 saves step 7 but rank 0 saves step 5"},
      {[](FullRequest& r) { r.translate = false; }, "another translate_if_full"},
      {[](FullRequest& r) { r.tag = "optimizer_x"; }, "another checkpoint's companion"},
      {[](FullRequest& r) { r.tag = "m_partial"; }, "is needed otherwise"},
      {[](FullRequest& r) {
         r.weights->tensors[1].global = {401, 600};
       },
       "rank 1 holds 'rows' as float32 [401, 600]"},
      {[](FullRequest& r) { r.weights->tensors[1].dtype = Dtype::kI32; }, "rank 1 holds 'rows' as int32"},
      {[](FullRequest& r) { r.weights->tensors[1].box.offset[0] -= 1; }, "rows"},
      {[](FullRequest& r) { r.weights->storages[0].data = nullptr; }, "not in memory"},
  };
  for (const Case& c : cases) {
    MemoryStorage storage;
    const SaveOutcome outcome = save_whole(storage, {"m", 5, 2, false}, "out", [&](int rank, FullRequest& request) {
      if (rank == 1) c.change(request);
    });
    EXPECT_THAT(error_of(outcome, ErrorKind::kInvalidArgument), HasSubstr(c.text));
    EXPECT_EQ(storage.calls(), 0);
  }
  // One that saves a partial one meanwhile.
  MemoryStorage storage;
  EXPECT_THAT(error_of(as_ranks(2,
                                [&](int rank, Peers& peers, Transport& transport) {
                                  RankFull full({"m", 5, 2, false}, rank, "out");
                                  RankFiles partial({"m", 5, 2}, rank, "out");
                                  return rank == 0 ? save_full(storage, peers, &transport, full.request)
                                                   : save_partial(storage, peers, partial.request);
                                }),
                       ErrorKind::kInvalidArgument),
              HasSubstr("rank 1 saves kind"));
  EXPECT_EQ(storage.calls(), 0);
}

TEST(SaveFull, ASliceThatNobodyHoldsIsNamed) {
  MemoryStorage storage;
  const SaveOutcome outcome = save_whole(storage, {"m", 5, 2, false}, "out", [&](int rank, FullRequest& request) {
    if (rank == 0) return;
    request.weights->tensors[0].box = {{0, 600}, {300, 500}};
    request.weights->tensors[0].size = {300, 600};
  });
  EXPECT_THAT(error_of(outcome, ErrorKind::kInvalidArgument), HasSubstr("'columns'"));
  EXPECT_EQ(storage.calls(), 0);
}

// The family's names, from slices of logical tensors that tensor-parallel ranks hold.
TEST(SaveFull, IsTranslatedToHuggingFaceNames) {
  const Value config = parse_json(
      R"({"model_type": "gpt2", "n_embd": 96, "n_layer": 2, "n_head": 4, "vocab_size": 701, "n_positions": 640})",
      "test");
  const FamilyModel family = describe_model(config);
  for (const int ranks : {1, 2, 3}) {
    MemoryStorage storage;
    std::map<std::string, std::pair<Shape, std::string>> logical;
    std::vector<std::unique_ptr<FullRequest>> requests;
    std::vector<std::unique_ptr<RankSlices>> slices;
    for (int r = 0; r < ranks; ++r) {
      requests.push_back(std::make_unique<FullRequest>());
      slices.push_back(std::make_unique<RankSlices>());
      FullRequest& request = *requests.back();
      request.path = "out";
      request.tag = "model.pt";
      request.manifest.model_config = config;
      request.manifest.partition.first = {0, 2};
      request.manifest.tp = request.manifest.world_size = ranks;
      request.weights.emplace();
      for (const FamilyTensor& tensor : family.tensors) {
        for (const Piece& piece : tensor.pieces) {
          auto& [shape, bytes] = logical[piece.name];
          shape = piece.shape;
          if (bytes.empty()) bytes = FullState{"", static_cast<int64_t>(logical.size()), 1}.bytes(piece.name, shape);
          const bool columns = piece.name.ends_with("dense.weight") || piece.name.ends_with("dense2.weight");
          const bool rows = piece.name.ends_with("query.weight") || piece.name.ends_with("dense1.weight") ||
                            piece.name.ends_with("word_embedding.weight");
          const Box box = columns ? part_of(shape, 1, r, ranks) : rows ? part_of(shape, 0, r, ranks) : whole(shape);
          request.weights->value.set(piece.name, slices.back()->add(*request.weights, "model/" + piece.name, shape, box,
                                                                    RankSlices::cut(bytes, shape, box)));
        }
      }
      request.weights->value.set(
          "stray", slices.back()->add(*request.weights, "model/stray", {2}, whole({2}), std::string(8, 'x')));
    }
    const SaveOutcome outcome = as_ranks(ranks, [&](int rank, Peers& peers, Transport& transport) {
      return save_full(storage, peers, &transport, *requests[static_cast<size_t>(rank)]);
    });
    for (const auto& error : outcome.errors) ASSERT_FALSE(error) << error->what();
    EXPECT_THAT(outcome.results[0]->warnings, testing::ElementsAre(HasSubstr("stray is left out")));
    const Index index = read_pt(storage, "out/model.pt");
    EXPECT_EQ(index.values.find("lm_head.weight")->get_if<TensorRef>() != nullptr, true);
    ASSERT_TRUE(index.find("transformer.h.1.attn.c_attn.weight"));
    EXPECT_EQ(index.find("transformer.h.1.attn.c_attn.weight")->shape, (Shape{96, 288}));
    std::vector<std::string> unexpected;
    const Index back = to_logical(index, family, &unexpected);
    EXPECT_TRUE(unexpected.empty());
    for (const auto& [name, held] : logical) EXPECT_TRUE(read_tensor(storage, back, name) == held.second) << name;
  }
}

TEST(SaveFull, AnUnknownModelKeepsItsNames) {
  MemoryStorage storage;
  const FullState state{"m", 1, 2, false};
  const SaveOutcome outcome = save_whole(storage, state, "out", [](int, FullRequest& request) {
    request.manifest.model_config = parse_json(R"({"model_type": "none_of_ours"})", "test");
  });
  ASSERT_TRUE(outcome.succeeded());
  expect_whole(storage, *find_checkpoint(storage, "out", "m", nullptr, CheckpointKind::kFull), state);
}

TEST(SaveFull, NewestOfTheOtherKindFallsBack) {
  MemoryStorage storage;
  const TestState first{"a", 1, 2}, second{"b", 2, 2};
  const FullState whole_one{"w", 3, 2, false}, old_one{"a", 1, 2, true};
  ASSERT_TRUE(save(storage, first, "out").succeeded());
  ASSERT_TRUE(save_whole(storage, old_one, "out").succeeded());  // the tag of a partial one
  ASSERT_TRUE(save(storage, second, "out").succeeded());
  ASSERT_TRUE(save_whole(storage, whole_one, "out").succeeded());
  EXPECT_EQ(read_text(storage, "out/newest"), "w\n");
  const auto partial = [&](const std::string& tag) { return find_checkpoint(storage, "out", tag, nullptr); };
  const auto full = [&](const std::string& tag) {
    return find_checkpoint(storage, "out", tag, nullptr, CheckpointKind::kFull);
  };
  expect_whole(storage, *partial(""), second);
  expect_whole(storage, *full(""), whole_one);
  expect_whole(storage, *partial("a"), first);
  expect_whole(storage, *full("a"), old_one);
  EXPECT_FALSE(full("b"));
  EXPECT_FALSE(full("a_partial"));
  EXPECT_FALSE(partial("w"));
  write_newest(storage, "out", "a_partial");  // as a run that has gone back: what lies beyond its step comes last
  expect_whole(storage, *full(""), old_one);
  expect_whole(storage, *partial(""), first);
  const std::vector<Found> all = scan(storage, "out");
  std::vector<std::string> names;
  for (const Found& found : all) names.push_back(found.name);
  EXPECT_EQ(names, (std::vector<std::string>{"w", "b_partial", "a", "a_partial"}));
}

TEST(SaveFull, RetentionPrunesPartialOnesOnlyAndKeepsTheNewest) {
  MemoryStorage storage;
  for (int step = 1; step <= 4; ++step)
    ASSERT_TRUE(save(storage, {"p" + std::to_string(step), step, 1}, "out").succeeded());
  ASSERT_TRUE(save_whole(storage, {"old", 1, 1, true}, "out").succeeded());
  const auto keep = [](int number) {
    return [number](int, FullRequest& request) { request.num_kept_partial_checkpoints = number; };
  };
  SaveOutcome outcome = save_whole(storage, {"w", 9, 1, false}, "out", keep(2));
  ASSERT_TRUE(outcome.succeeded());
  EXPECT_EQ(outcome.results[0]->pruned, (std::vector<std::string>{"p2_partial", "p1_partial"}));
  outcome = save_whole(storage, {"w2", 10, 1, false}, "out", keep(0));
  EXPECT_EQ(outcome.results[0]->pruned, (std::vector<std::string>{"p3_partial"}));
  const auto found = find_checkpoint(storage, "out", "", nullptr);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->name, "p4_partial");
  // A partial save prunes no full one.
  const SaveOutcome next =
      save(storage, {"p5", 11, 1}, "out", [](int, SaveRequest& request) { request.num_kept_partial_checkpoints = 1; });
  EXPECT_EQ(next.results[0]->pruned, (std::vector<std::string>{"p4_partial"}));
  EXPECT_TRUE(find_checkpoint(storage, "out", "old", nullptr, CheckpointKind::kFull));
}

TEST(SaveFull, AFullDiskIsToldBeforeTheFirstByte) {
  class Tight final : public ForwardingStorage {
   public:
    using ForwardingStorage::ForwardingStorage;
    uint64_t free_bytes(const std::string&) override { return 100000; }
  };
  MemoryStorage memory;
  Tight storage(memory);
  const SaveOutcome outcome = save_whole(storage, {"m", 1, 2, true}, "out");
  EXPECT_THAT(error_of(outcome, ErrorKind::kNoSpace), HasSubstr("are free; nothing was written"));
  EXPECT_TRUE(memory.list("out").empty());
}

// Hang campaign: a rank that is absent, late or throws, in each phase. Whoever is left ends in time and names it.
class Stumbling final : public Peers {
 public:
  enum class How { kThrow, kLate, kLeave };
  Stumbling(Peers& base, int at, How how) : base_(base), at_(at), how_(how) {}
  int rank() const override { return base_.rank(); }
  int size() const override { return base_.size(); }
  int count() const { return count_; }
  std::vector<std::string> exchange(const std::string& message, std::chrono::milliseconds deadline) override {
    if (count_++ == at_) {
      if (how_ == How::kThrow) throw Error(ErrorKind::kPeer, "the network of rank 1 is gone");
      if (how_ == How::kLate) std::this_thread::sleep_for(std::chrono::milliseconds(700));
      if (how_ == How::kLeave) throw PowerCut();
    }
    return base_.exchange(message, deadline);
  }

 private:
  Peers& base_;
  int at_, count_ = 0;
  How how_;
};

TEST(SaveFull, ARankThatStumblesInAnyPhaseIsNamedInTime) {
  int points = 0;
  for (const Stumbling::How how : {Stumbling::How::kThrow, Stumbling::How::kLate, Stumbling::How::kLeave}) {
    for (int at = 0;; ++at) {
      SCOPED_TRACE(str("phase ", at, ", how ", static_cast<int>(how)));
      MemoryStorage storage;
      const FullState before{"m", 1, 3, true}, state{"m", 2, 3, true};
      ASSERT_TRUE(save_whole(storage, before, "out").succeeded());
      const auto began = std::chrono::steady_clock::now();
      std::atomic<int> exchanges{0};
      const SaveOutcome outcome = as_ranks(3, [&](int rank, Peers& peers, Transport& transport) {
        RankFull full(state, rank, "out");
        full.request.deadline = std::chrono::milliseconds(200);
        if (rank != 1) return save_full(storage, peers, &transport, full.request);
        Stumbling stumbling(peers, at, how);
        const SaveResult result = save_full(storage, stumbling, &transport, full.request);
        exchanges = stumbling.count();
        return result;
      });
      EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(3));
      if (outcome.succeeded()) {
        EXPECT_LE(exchanges, at);
        EXPECT_GE(at, 4);
        break;
      }
      for (const int other : {0, 2}) {
        ASSERT_TRUE(outcome.errors[static_cast<size_t>(other)]);
        EXPECT_THAT(outcome.errors[static_cast<size_t>(other)]->what(), HasSubstr("rank 1"));
      }
      ++points;
      // Old or new, whole; and the next one goes through.
      const auto found = find_checkpoint(storage, "out", "m", nullptr, CheckpointKind::kFull);
      ASSERT_TRUE(found);
      expect_whole(storage, *found, found->manifest->step == 2 ? state : before);
      ASSERT_TRUE(save_whole(storage, {"m", 3, 3, false}, "out").succeeded());
      EXPECT_TRUE(leftovers(storage, "out").empty());
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GE(points, 12);
}

TEST(SaveFull, ARankThatIsLateOrGoneWhileBytesMoveIsNamed) {
  class Halting final : public Transport {
   public:
    Halting(Transport& base, bool dies) : base_(base), dies_(dies) {}
    void move(std::span<const Outgoing> out, std::span<const Incoming> in,
              std::chrono::milliseconds deadline) override {
      if (dies_) throw PowerCut();
      std::this_thread::sleep_for(std::chrono::milliseconds(600));
      base_.move(out, in, deadline);
    }

   private:
    Transport& base_;
    bool dies_;
  };
  for (const bool dies : {false, true}) {
    MemoryStorage storage;
    const SaveOutcome outcome = as_ranks(2, [&](int rank, Peers& peers, Transport& transport) {
      RankFull full({"m", 2, 2, false}, rank, "out");
      full.request.deadline = std::chrono::milliseconds(200);
      Halting halting(transport, dies);
      return save_full(storage, peers, rank == 1 ? static_cast<Transport*>(&halting) : &transport, full.request);
    });
    ASSERT_TRUE(outcome.errors[0]);
    EXPECT_THAT(outcome.errors[0]->what(), HasSubstr("rank 1"));
    EXPECT_TRUE(scan(storage, "out").empty());
    ASSERT_TRUE(save_whole(storage, {"m", 3, 2, false}, "out").succeeded());
    EXPECT_TRUE(leftovers(storage, "out").empty());
  }
}

}  // namespace
}  // namespace shardsmith
