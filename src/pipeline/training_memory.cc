#include "pipeline/training_memory.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "base/error.h"
#include "family/local_model.h"
#include "optim/buckets.h"

namespace shardsmith {
namespace {

// Measured on x86: torch's code that the first step brings into memory, and the buffers that the matrix library keeps
// for each thread that multiplies.
constexpr int64_t kCode = int64_t{20} << 20, kWideBuffers = int64_t{33} << 20, kNarrowBuffers = int64_t{16} << 20;
constexpr int64_t kFloat = 4;  // bytes
constexpr const char* kWordEmbedding = "word_embedding.weight";

// Parameters of a stage, in elements of one rank.
struct Parameters {
  int64_t all = 0;
  size_t layers = 0;              // how many
  int64_t largest_of_layers = 0;  // a tensor
  int64_t head = 0;               // the head's matrix, tied or not
  int64_t tied = 0;               // the embedding, where the first and the last stage sum its gradients
  int64_t largest_shard = 0;      // of one replica, where they are dealt out
  std::vector<Transfer> transfers;
};

Parameters parameters_of(const FamilyModel& model, const Partition& partition, int stage, const TrainingOptions& o) {
  const FamilyModel local = local_model(model, 0, o.work.tp);
  const int64_t element = element_bytes(o.work.precision), blocks = model.description.num_layers;
  const int first = partition.first[static_cast<size_t>(stage)], end = partition.first[static_cast<size_t>(stage) + 1];
  const bool is_last = stage == partition.stages() - 1;
  Parameters p;
  p.layers = static_cast<size_t>(end - first);
  const bool sums_tie = model.description.tied_head && partition.stages() > 1 && (stage == 0 || is_last);
  std::vector<BucketParameter> dealt;
  for (const size_t t : stage_tensors(model, partition, stage)) {
    const FamilyTensor& tensor = local.tensors[t];
    const std::string& name = tensor.pieces.front().name;
    const int64_t count = volume(tensor.shape), rows = tensor.shape.empty() ? 1 : tensor.shape[0];
    const bool is_embedding = name == kWordEmbedding;
    p.all += count;
    if (is_embedding && sums_tie) p.tied = count;
    if (tensor.place >= 0 && tensor.place < blocks) p.largest_of_layers = std::max(p.largest_of_layers, count);
    if (is_last && (is_embedding ? model.description.tied_head : name == "lm_head.weight")) p.head = count;
    dealt.push_back(
        {rows, rows ? count / rows : 0, element, tensor.row_unit(), tensor.place, 0, is_embedding && sums_tie});
  }
  if (o.rdp == 1) return p;
  const auto cap = static_cast<int64_t>(o.bucket_cap_mb * (1 << 20));
  const std::vector<Bucket> buckets = make_buckets(dealt, cap, o.shard_optimizer_state ? o.rdp : 1);
  p.transfers = make_transfers(buckets, dealt, cap);
  for (int rank = 0; o.shard_optimizer_state && rank < o.rdp; ++rank) {
    int64_t owned = 0;
    for (const Bucket& bucket : buckets)
      for (const RowRange& range : bucket.shares[static_cast<size_t>(rank)])
        owned += (range.end - range.begin) * dealt[range.parameter].row_elements;
    p.largest_shard = std::max(p.largest_shard, owned);
  }
  return p;
}

// What a rank holds, followed through one step.
class StepMemory {
 public:
  StepMemory(const FamilyModel& model, const Partition& partition, int stage, const TrainingOptions& options)
      : o_(options),
        first_(partition.first[static_cast<size_t>(stage)]),
        stage_(stage),
        stages_(partition.stages()),
        element_(element_bytes(options.work.precision)),
        activation_(model, options.work),
        parameters_(parameters_of(model, partition, stage, options)) {}

  TrainingMemory largest() {
    const int64_t updated = shards() ? parameters_.largest_shard : parameters_.all;
    most_.weights = most_.gradients = element_ * parameters_.all;
    most_.masters = o_.work.precision == Precision::kFp32 ? 0 : kFloat * updated;
    most_.moments = 2 * kFloat * updated;
    has_head_gradient_ = o_.accumulates;
    has_spare_ = o_.accumulates || o_.microbatches > 1;
    for (const Task& task :
         stage_order(o_.schedule, stage_, stages_, o_.microbatches, o_.active_microbatches, o_.work.tp > 1))
      task.kind == Task::Kind::kForward ? forward() : backward();
    reduce_and_gather();
    const int64_t threads = stages_ > 1 ? o_.microbatches : 1;  // of ours: how many OpenMP has is not known here
    const bool is_wide = o_.work.precision == Precision::kFp32;
    most_.working += kCode + threads * (is_wide ? kWideBuffers : kNarrowBuffers) + activation_.rotary_tables();
    return most_;
  }

 private:
  bool is_first() const { return stage_ == 0; }
  bool is_last() const { return stage_ == stages_ - 1; }
  bool shards() const { return o_.shard_optimizer_state && o_.rdp > 1; }

  void moment(int64_t working, int64_t computed_again = 0) {
    // Of the head's gradient one for each microbatch between loss and backward, the gradient itself, which is counted
    // already, and the one that was used last (nn/leaf_gradient.h).
    const int copies = losses_ + has_head_gradient_ + has_spare_;
    working += under_way() + std::max(0, copies - 1) * element_ * parameters_.head;
    most_.working = std::max(most_.working, working);
    most_.activations = std::max(most_.activations, activations_ + computed_again);
  }

  // Layers [begin, end) of the stage, which are computed again together.
  struct Segment {
    size_t begin, end;
    int64_t size() const { return static_cast<int64_t>(end - begin); }
  };
  std::vector<Segment> segments() const {
    std::vector<Segment> found;
    for (size_t i = 0; i < parameters_.layers; ++i) {
      const bool joins = i > 0 && again() && (first_ + static_cast<int64_t>(i)) % o_.checkpointed_layers != 0;
      if (joins)
        found.back().end = i + 1;
      else
        found.push_back({i, i + 1});
    }
    return found;
  }
  bool again() const { return o_.checkpointed_layers > 0; }
  int64_t kept_of_a_segment() const { return again() ? activation_.hidden() : activation_.layer(); }
  // What a microbatch keeps at the stage's ends: its input where the first layer doesn't, and, before the last stage,
  // its output, which is on its way.
  int64_t kept_at_ends() const {
    int64_t bytes = is_first() ? activation_.embedding() : 0;
    if (!is_first() && !again() && !activation_.keeps_input()) bytes += activation_.hidden();
    return bytes + (is_last() ? 0 : activation_.hidden());
  }
  // The next microbatch's input, and gradients that the stage before may not have received.
  int64_t under_way() const { return is_first() ? 0 : activation_.hidden() * (1 + std::min(o_.microbatches, stages_)); }

  void forward() {
    activations_ += kept_at_ends() + static_cast<int64_t>(segments().size()) * kept_of_a_segment();
    if (is_last()) {
      activations_ += activation_.hidden();  // to the step's end
      activations_ += activation_.head();
      has_spare_ = false;  // it is used, or there was none
      ++losses_;
    }
    moment(is_last() ? activation_.loss() : 0);
  }

  void backward() {
    const bool is_added = backwards_++ > 0 || o_.accumulates;
    if (is_last()) {
      --losses_;
      has_spare_ = has_head_gradient_;
      has_head_gradient_ = true;
      activations_ -= activation_.head();
    }
    // Where there is a gradient the new one is added to it, tensor by tensor; the last stage's of a tied embedding
    // comes while the last backward runs.
    const int64_t working = activation_.layer_backward() + (is_added ? element_ * parameters_.largest_of_layers : 0) +
                            (is_first() && backwards_ == o_.microbatches ? element_ * parameters_.tied : 0);
    const std::vector<Segment> all = segments();
    for (auto segment = all.rbegin(); segment != all.rend(); ++segment) {
      const int64_t input = activation_.keeps_input() ? activation_.hidden() : 0;  // which is there already
      moment(working, again() ? segment->size() * activation_.layer() - input : 0);
      activations_ -= kept_of_a_segment();
    }
    activations_ -= kept_at_ends();
  }

  // Transfers of gradients or shards that are under way at a time. Each is a copy, which torch's gloo copies once more
  // where every rank gets a share.
  void reduce_and_gather() {
    const std::vector<Transfer>& transfers = parameters_.transfers;
    for (size_t t = 0; t < transfers.size(); ++t) {
      int64_t elements = 0;  // the oldest lands when the newest is there
      for (size_t i = t - std::min(t, kTransfersUnderWay); i <= t; ++i) elements += transfers[i].part_elements;
      moment(element_ * elements * (shards() ? 2 * o_.rdp + 1 : 1));
    }
  }

  const TrainingOptions o_;
  const int first_, stage_, stages_;
  const int64_t element_;
  const ActivationMemory activation_;
  const Parameters parameters_;
  TrainingMemory most_;
  int64_t activations_ = 0;
  int losses_ = 0;  // microbatches between loss and backward
  int backwards_ = 0;
  bool has_head_gradient_ = false, has_spare_ = false;
};

void require_counts(const TrainingOptions& o) {
  const auto at_least_one = [](const char* what, int64_t count) {
    if (count < 1) fail(ErrorKind::kInvalidArgument, what, ": ", count, ", it must be at least 1");
  };
  at_least_one("sequences of a microbatch", o.work.rows);
  at_least_one("tokens of a sequence", o.work.sequence);
  at_least_one("replicas", o.rdp);
  at_least_one("microbatches", o.microbatches);
}

}  // namespace

int64_t checkpointed_layers(const std::string& word) {
  if (word == "none") return 0;
  if (word == "each") return 1;
  if (word == "contiguous") return kAllLayers;
  constexpr std::string_view kGroup = "group_";
  int64_t size = 0;
  if (word.starts_with(kGroup)) {
    const char* end = word.data() + word.size();
    const auto [stop, error] = std::from_chars(word.data() + kGroup.size(), end, size);
    if (error == std::errc() && stop == end && size > 0) return size;
  }
  fail(ErrorKind::kInvalidArgument,
       "activation checkpointing must be none, each, contiguous or group_N with a number N "
       "above 0, not '",
       word, "'");
}

std::array<std::pair<const char*, int64_t>, 6> TrainingMemory::parts() const {
  return {{{"weights", weights},
           {"gradients", gradients},
           {"masters", masters},
           {"moments", moments},
           {"activations", activations},
           {"working", working}}};
}

TrainingMemory training_memory(const FamilyModel& model, const Partition& partition, int stage,
                               const TrainingOptions& options) {
  require_counts(options);
  require_sound(partition, static_cast<int>(model.description.num_layers));
  if (stage < 0 || stage >= partition.stages())
    fail(ErrorKind::kInvalidArgument, "there is no pipeline stage ", stage, " of ", partition.stages());
  return StepMemory(model, partition, stage, options).largest();
}

}  // namespace shardsmith
