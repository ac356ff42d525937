#include "optim/buckets.h"

#include <algorithm>
#include <numeric>

namespace shardsmith {
namespace {

int64_t elements_of(const BucketParameter& p) { return p.rows * p.row_elements; }

// Cuts the bucket's elements, one parameter after the other, at the unit nearest to each k / ranks of them.
void deal_out(Bucket& bucket, const std::vector<BucketParameter>& parameters, int ranks) {
  bucket.shares.assign(static_cast<size_t>(ranks), {});
  int64_t total = 0;
  for (const size_t i : bucket.parameters) total += elements_of(parameters[i]);
  const auto end_of = [&](int rank) { return total / ranks * (rank + 1) + total % ranks * (rank + 1) / ranks; };
  std::vector<int64_t> owned(static_cast<size_t>(ranks), 0);
  int64_t before = 0;  // elements of the parameters before
  int rank = 0;
  for (const size_t i : bucket.parameters) {
    const BucketParameter& p = parameters[i];
    const int64_t unit = p.unit * p.row_elements;
    for (int64_t row = 0; row < p.rows;) {
      int64_t end = p.rows;
      if (rank + 1 < ranks) {
        const int64_t wanted = end_of(rank) - before;  // elements of this parameter
        end = std::min(p.rows, std::max<int64_t>(0, (wanted + unit / 2) / unit) * p.unit);
      }
      if (end > row) {
        bucket.shares[static_cast<size_t>(rank)].push_back({i, row, end});
        owned[static_cast<size_t>(rank)] += (end - row) * p.row_elements;
        row = end;
      }
      if (row < p.rows) ++rank;
    }
    before += elements_of(p);
    while (rank + 1 < ranks && end_of(rank) <= before) ++rank;
  }
  bucket.share_elements = *std::max_element(owned.begin(), owned.end());
}

}  // namespace

std::vector<Bucket> make_buckets(const std::vector<BucketParameter>& parameters, int64_t cap_bytes, int ranks) {
  std::vector<size_t> order(parameters.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto place = [&](size_t i) { return parameters[i].alone ? Bucket::kNeverEarly : parameters[i].place; };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return place(a) > place(b); });
  std::vector<Bucket> buckets;
  int64_t bytes = 0;
  for (const size_t i : order) {
    const BucketParameter& p = parameters[i];
    if (elements_of(p) == 0) continue;
    const int64_t size = elements_of(p) * p.element_size;
    const bool fits = !buckets.empty() && !p.alone && bytes + size <= cap_bytes &&
                      parameters[buckets.back().parameters.front()].dtype == p.dtype;
    if (!fits) buckets.emplace_back(), bytes = 0;
    buckets.back().parameters.push_back(i);
    buckets.back().place = place(i);
    bytes += size;
  }
  for (Bucket& bucket : buckets) deal_out(bucket, parameters, ranks);
  return buckets;
}

}  // namespace shardsmith
