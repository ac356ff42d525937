#include "layout/partition.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <string_view>
#include <unordered_map>

#include "base/error.h"

namespace shardsmith {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Costs of runs of blocks, the embedding and the head on their ends.
class Runs {
 public:
  Runs(const PartitionCosts& costs, int stages) : costs_(costs), stages_(stages), sums_{0} {
    for (double block : costs.blocks) sums_.push_back(sums_.back() + block);
  }
  // Stage `stage` with the blocks [begin, end).
  double cost(int stage, int begin, int end) const {
    double sum = sums_[static_cast<size_t>(end)] - sums_[static_cast<size_t>(begin)];
    if (stage == 0) sum += costs_.embedding;
    if (stage == stages_ - 1) sum += costs_.head;
    return sum;
  }

 private:
  const PartitionCosts& costs_;
  int stages_;
  std::vector<double> sums_;
};

// The cheapest way to lay all blocks over all stages, where `join` puts a stage's cost to that of the stages before.
// No stage may cost more than `limit`, and join(a, b) >= own(b): a stage's runs are tried from the shortest on, until
// they alone cost more than what was found. So the work is about blocks x blocks x log(stages), not blocks^2 x stages.
template <typename Join, typename Own>
Partition cheapest(const Runs& runs, int blocks, int stages, double limit, const Join& join, const Own& own) {
  const size_t width = static_cast<size_t>(blocks) + 1;
  std::vector<double> best(width * (static_cast<size_t>(stages) + 1), kInfinity);
  std::vector<int> from(best.size(), 0);
  best[0] = 0;
  const auto at = [width](int stage, int block) {
    return static_cast<size_t>(stage) * width + static_cast<size_t>(block);
  };
  for (int s = 0; s < stages; ++s) {
    for (int end = s + 1; end <= blocks - (stages - 1 - s); ++end) {
      double& found = best[at(s + 1, end)];
      for (int begin = end - 1; begin >= s; --begin) {
        const double run = runs.cost(s, begin, end);  // grows as begin falls
        if (run > limit || own(run) > found) break;
        if (best[at(s, begin)] == kInfinity) continue;
        const double cost = join(best[at(s, begin)], run);
        if (cost <= found) found = cost, from[at(s + 1, end)] = begin;
      }
    }
  }
  Partition partition{std::vector<int>(static_cast<size_t>(stages) + 1, blocks)};
  for (int s = stages; s > 0; --s) {
    partition.first[static_cast<size_t>(s) - 1] = from[at(s, partition.first[static_cast<size_t>(s)])];
  }
  return partition;
}

double costliest(const Runs& runs, const Partition& partition) {
  double most = 0;
  for (int s = 0; s < partition.stages(); ++s) {
    most = std::max(most,
                    runs.cost(s, partition.first[static_cast<size_t>(s)], partition.first[static_cast<size_t>(s) + 1]));
  }
  return most;
}

[[noreturn]] void too_few(int blocks, int stages) {
  fail(ErrorKind::kInvalidArgument, "the model has ", blocks, " layers, which can't be split over ", stages,
       " pipeline stages; use a pipeline degree of at most ", blocks);
}

[[noreturn]] void empty_stage(int stage, int stages) {
  fail(ErrorKind::kInvalidArgument, "stage ", stage, " of ", stages,
       " gets no layer: put at least one on it, or use a pipeline degree of ", stages - 1);
}

}  // namespace

Partition make_partition(const PartitionCosts& costs, int stages) {
  const int blocks = static_cast<int>(costs.blocks.size());
  if (stages < 1) fail(ErrorKind::kInvalidArgument, "a model can't be split into ", stages, " pipeline stages");
  if (blocks < stages) too_few(blocks, stages);
  const auto sound = [](double c) { return std::isfinite(c) && c >= 0; };
  if (!sound(costs.embedding) || !sound(costs.head) || !std::all_of(costs.blocks.begin(), costs.blocks.end(), sound)) {
    fail(ErrorKind::kInvalidArgument, "the costs of a partition must be finite and not negative");
  }
  const Runs runs(costs, stages);
  const Partition fair = cheapest(
      runs, blocks, stages, kInfinity, [](double before, double run) { return std::max(before, run); },
      [](double run) { return run; });
  // Sums in another order differ in their last bits; that much more is still equal.
  const double limit = costliest(runs, fair) * (1 + 1e-12);
  return cheapest(
      runs, blocks, stages, limit, [](double before, double run) { return before + run * run; },
      [](double run) { return run * run; });
}

void require_sound(const Partition& partition, int blocks) {
  const std::vector<int>& first = partition.first;
  if (first.size() < 2 || first.front() != 0 || first.back() != blocks)
    fail(ErrorKind::kInvalidArgument, "a partition of ", blocks, " layers goes from 0 to ", blocks, ", not from ",
         first.empty() ? "nothing" : std::to_string(first.front()), " to ",
         first.empty() ? "nothing" : std::to_string(first.back()));
  for (size_t s = 0; s + 1 < first.size(); ++s)
    if (first[s] >= first[s + 1]) empty_stage(static_cast<int>(s), partition.stages());
}

double balance(const PartitionCosts& costs, const Partition& partition) {
  const Runs runs(costs, partition.stages());
  double total = costs.embedding + costs.head;
  for (double block : costs.blocks) total += block;
  const double most = costliest(runs, partition);
  return most > 0 ? total / partition.stages() / most : 1;
}

Partition manual_partition(std::span<const PlacedName> names, int blocks, int stages,
                           std::span<const PartitionWish> wishes, int default_stage) {
  const auto check = [stages](const std::string& what, int stage) {
    if (stage < 0 || stage >= stages)
      fail(ErrorKind::kInvalidArgument, what, " is put on stage ", stage, ": with ", stages,
           " pipeline stages they are 0 to ", stages - 1);
  };
  check("default_partition: what nobody places", default_stage);
  if (blocks < stages) too_few(blocks, stages);
  std::unordered_map<std::string_view, int> wished;
  for (const PartitionWish& wish : wishes) {
    check(wish.path.empty() ? "the model" : wish.path, wish.stage);
    wished[wish.path] = wish.stage;
  }
  // The nearest wish around a tensor, -1 if there is none.
  const auto wish_of = [&](std::string_view name) {
    while (!name.empty()) {
      const size_t dot = name.rfind('.');
      name = name.substr(0, dot == std::string_view::npos ? 0 : dot);
      if (const auto found = wished.find(name); found != wished.end()) return found->second;
    }
    return -1;
  };

  struct Block {
    int stage = -1;
    std::string_view name;  // the tensor that told the stage
  };
  std::vector<Block> all(static_cast<size_t>(blocks));
  for (const PlacedName& placed : names) {
    const int wish = wish_of(placed.name);
    if (placed.place < 0 || placed.place >= blocks) {  // an end: only where somebody wants it elsewhere is it wrong
      const int must = placed.place < 0 ? 0 : stages - 1;
      if (wish >= 0 && wish != must)
        fail(ErrorKind::kInvalidArgument, placed.name, " is put on stage ", wish, ": the ",
             placed.place < 0 ? "embedding belongs to the first stage, 0"
                              : "final norm and the head belong to the last stage, ",
             placed.place < 0 ? "" : std::to_string(must));
      continue;
    }
    Block& block = all[static_cast<size_t>(placed.place)];
    const int stage = wish >= 0 ? wish : default_stage;
    if (block.stage >= 0 && block.stage != stage)
      fail(ErrorKind::kInvalidArgument, "layer ", placed.place, " is torn apart: ", block.name, " is put on stage ",
           block.stage, ", ", placed.name, " on stage ", stage, "; a layer belongs to one stage as a whole");
    block = {stage, block.stage >= 0 ? block.name : placed.name};
  }

  Partition partition{{0}};
  int stage = 0;
  for (int b = 0; b < blocks; ++b) {
    const Block& block = all[static_cast<size_t>(b)];
    if (block.stage < 0) fail(ErrorKind::kInvalidArgument, "layer ", b, " of ", blocks, " has no tensors to place");
    if (block.stage < stage)
      fail(ErrorKind::kInvalidArgument, "layer ", b, " (", block.name, ") is put on stage ", block.stage, ", layer ",
           b - 1, " before it on stage ", stage, ": the layers of a stage follow each other, and the stages too");
    for (; stage < block.stage; ++stage) {
      if (partition.first.back() == b) empty_stage(stage, stages);
      partition.first.push_back(b);
    }
  }
  if (stage != stages - 1) empty_stage(stage + 1, stages);
  partition.first.push_back(blocks);
  return partition;
}

Value partition_value(const Partition& partition) {
  Value decision;
  decision.set("layers", partition.first.back());
  decision.set("stages", partition.stages());
  List first;
  for (const int block : partition.first) first.push_back(Value(block));
  decision.set("partition", std::move(first));
  return decision;
}

Partition partition_from(const Value& decision, int blocks, int stages, const std::string& where) {
  const auto number = [&](const char* key) {
    const Value* found = decision.find(key);
    const int64_t* n = found ? found->get_if<int64_t>() : nullptr;
    if (!n) fail(ErrorKind::kCorrupt, where, ": '", key, "' is missing or no whole number: this is no partition");
    return *n;
  };
  const int64_t layers = number("layers"), of = number("stages");
  if (layers != blocks || of != stages)
    fail(ErrorKind::kInvalidArgument, where, ": a partition of ", layers, " layers into ", of,
         " stages, where the model has ", blocks, " layers and pipeline_parallel_degree is ", stages,
         ": delete the file, or ask for the degree that it was made for");
  Partition partition;
  const Value* found = decision.find("partition");
  const List* list = found ? found->get_if<List>() : nullptr;
  bool sound = list && list->size() == static_cast<size_t>(stages) + 1;
  for (size_t i = 0; sound && i < list->size(); ++i) {
    const int64_t* n = (*list)[i].get_if<int64_t>();
    sound = n && (i == 0 ? *n == 0 : *n > partition.first.back()) && *n <= blocks;
    if (sound) partition.first.push_back(static_cast<int>(*n));
  }
  if (!sound || partition.first.back() != blocks)
    fail(ErrorKind::kCorrupt, where, ": 'partition' must be ", stages + 1, " ascending numbers from 0 to ", blocks);
  return partition;
}

}  // namespace shardsmith
