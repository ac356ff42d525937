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
        row = end;
      }
      if (row < p.rows) ++rank;
    }
    before += elements_of(p);
    while (rank + 1 < ranks && end_of(rank) <= before) ++rank;
  }
}

// One share in parts of at most `most` elements, if a row isn't larger.
std::vector<std::vector<RowRange>> cut(const std::vector<RowRange>& share,
                                       const std::vector<BucketParameter>& parameters, int64_t most) {
  std::vector<std::vector<RowRange>> parts;
  int64_t left = 0;
  for (const RowRange& range : share) {
    const int64_t row_elements = parameters[range.parameter].row_elements;
    for (int64_t row = range.begin; row < range.end;) {
      if (parts.empty() || left < row_elements) parts.emplace_back(), left = std::max(most, row_elements);
      const int64_t end = std::min(range.end, row + left / row_elements);
      parts.back().push_back({range.parameter, row, end});
      left -= (end - row) * row_elements;
      row = end;
    }
  }
  return parts;
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

std::vector<Transfer> make_transfers(const std::vector<Bucket>& buckets, const std::vector<BucketParameter>& parameters,
                                     int64_t cap_bytes) {
  std::vector<Transfer> transfers;
  for (size_t b = 0; b < buckets.size(); ++b) {
    const std::vector<std::vector<RowRange>>& shares = buckets[b].shares;
    const int64_t element_size = parameters[buckets[b].parameters.front()].element_size;
    const int64_t most = cap_bytes / element_size / static_cast<int64_t>(shares.size());
    const size_t first = transfers.size();
    for (size_t r = 0; r < shares.size(); ++r) {
      const std::vector<std::vector<RowRange>> parts = cut(shares[r], parameters, most);
      for (size_t i = 0; i < parts.size(); ++i) {
        if (first + i == transfers.size()) transfers.push_back({b, std::vector<std::vector<RowRange>>(shares.size())});
        Transfer& transfer = transfers[first + i];
        int64_t elements = 0;
        for (const RowRange& range : parts[i])
          elements += (range.end - range.begin) * parameters[range.parameter].row_elements;
        transfer.parts[r] = parts[i];
        transfer.part_elements = std::max(transfer.part_elements, elements);
      }
    }
  }
  return transfers;
}

}  // namespace shardsmith
