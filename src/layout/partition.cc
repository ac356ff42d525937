#include "layout/partition.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <functional>
#include <limits>

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
Partition cheapest(const Runs& runs, int blocks, int stages, const std::function<double(double, double)>& join) {
  const size_t width = static_cast<size_t>(blocks) + 1;
  std::vector<double> best(width * (static_cast<size_t>(stages) + 1), kInfinity);
  std::vector<int> from(best.size(), 0);
  best[0] = 0;
  const auto at = [width](int stage, int block) {
    return static_cast<size_t>(stage) * width + static_cast<size_t>(block);
  };
  for (int s = 0; s < stages; ++s) {
    for (int end = s + 1; end <= blocks - (stages - 1 - s); ++end) {
      for (int begin = s; begin < end; ++begin) {
        if (best[at(s, begin)] == kInfinity) continue;
        const double cost = join(best[at(s, begin)], runs.cost(s, begin, end));
        if (cost < best[at(s + 1, end)]) best[at(s + 1, end)] = cost, from[at(s + 1, end)] = begin;
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

}  // namespace

Partition make_partition(const PartitionCosts& costs, int stages) {
  const int blocks = static_cast<int>(costs.blocks.size());
  if (stages < 1) fail(ErrorKind::kInvalidArgument, "a model can't be split into ", stages, " pipeline stages");
  if (blocks < stages) {
    fail(ErrorKind::kInvalidArgument, "the model has ", blocks, " layers, which can't be split over ", stages,
         " pipeline stages; use a pipeline degree of at most ", blocks);
  }
  const auto sound = [](double c) { return std::isfinite(c) && c >= 0; };
  if (!sound(costs.embedding) || !sound(costs.head) || !std::all_of(costs.blocks.begin(), costs.blocks.end(), sound)) {
    fail(ErrorKind::kInvalidArgument, "the costs of a partition must be finite and not negative");
  }
  const Runs runs(costs, stages);
  const Partition fair = cheapest(runs, blocks, stages, [](double a, double b) { return std::max(a, b); });
  // Sums in another order differ in their last bits; that much more is still equal.
  const double limit = costliest(runs, fair) * (1 + 1e-12);
  return cheapest(runs, blocks, stages, [limit](double a, double b) { return b > limit ? kInfinity : a + b * b; });
}

double balance(const PartitionCosts& costs, const Partition& partition) {
  const Runs runs(costs, partition.stages());
  double total = costs.embedding + costs.head;
  for (double block : costs.blocks) total += block;
  const double most = costliest(runs, partition);
  return most > 0 ? total / partition.stages() / most : 1;
}

}  // namespace shardsmith
