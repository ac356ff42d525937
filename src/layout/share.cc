#include "layout/share.h"

#include <algorithm>

namespace shardsmith {
namespace {

// How many of `blocks` each of `ranks` gets: the least loaded are filled up first.
std::vector<uint64_t> quotas(uint64_t blocks, const std::vector<int>& ranks, const std::vector<uint64_t>& load) {
  std::vector<size_t> order(ranks.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto load_of = [&](size_t i) { return load[static_cast<size_t>(ranks[i])]; };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return load_of(a) < load_of(b); });
  // The first `filled` of them come to one level.
  size_t filled = 0;
  uint64_t below = 0;  // their loads' sum
  do {
    below += load_of(order[filled++]);
  } while (filled < order.size() && load_of(order[filled]) * filled < below + blocks);
  const uint64_t total = below + blocks;
  std::vector<uint64_t> result(ranks.size(), 0);
  for (size_t k = 0; k < filled; ++k) {
    const uint64_t level = total / filled + (k < total % filled ? 1 : 0);
    result[order[k]] = level - load_of(order[k]);
  }
  return result;
}

}  // namespace

std::vector<Share> share_out(const std::vector<Stretch>& stretches, std::vector<uint64_t>& load) {
  std::vector<Share> shares;
  uint64_t at = 0;
  for (const Stretch& stretch : stretches) {
    const std::vector<uint64_t> parts = quotas(stretch.blocks, stretch.ranks, load);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i] == 0) continue;
      const int rank = stretch.ranks[i];
      load[static_cast<size_t>(rank)] += parts[i];
      if (!shares.empty() && shares.back().rank == rank && shares.back().end == at)
        shares.back().end += parts[i];
      else
        shares.push_back({at, at + parts[i], rank});
      at += parts[i];
    }
  }
  return shares;
}

}  // namespace shardsmith
