// Which parameters' gradients are reduced together, and which rank owns what of them. Pure arithmetic.
//
// Buckets follow each other as gradients get ready: from the last layer to the first. Where the optimizer's state is
// sharded each rank owns one share of every bucket, cut between rows of a parameter; so all ranks own equally much
// (but for a row a bucket), and a bucket can be reduced while the backward goes on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace shardsmith {

struct BucketParameter {
  int64_t rows = 0;  // of dimension 0
  int64_t row_elements = 0;
  int64_t element_size = 0;
  int64_t unit = 1;    // rows that belong together: shares are cut between units
  int place = 0;       // see FamilyTensor
  int dtype = 0;       // different ones don't share a bucket
  bool alone = false;  // a bucket of its own, which is the last and never ready early
};

// Rows [begin, end) of a parameter.
struct RowRange {
  size_t parameter = 0;
  int64_t begin = 0, end = 0;
  bool operator==(const RowRange&) const = default;
};

struct Bucket {
  static constexpr int kNeverEarly = std::numeric_limits<int>::min();
  std::vector<size_t> parameters;
  int place = kNeverEarly;  // its gradients are made when those of all parameters at this place and behind are
  std::vector<std::vector<RowRange>> shares;  // by rank; together each row once
};

// A part of a bucket that is sent at once: a part of each rank's share.
struct Transfer {
  size_t bucket = 0;
  std::vector<std::vector<RowRange>> parts;  // by rank
  int64_t part_elements = 0;                 // of the largest part
};

// How many may be under way at once: each is a copy of what it sends.
constexpr size_t kTransfersUnderWay = 3;

// `parameters` in any order; within a place they keep it. A bucket holds at least one parameter, and no second one that
// would make it larger than `cap_bytes`.
std::vector<Bucket> make_buckets(const std::vector<BucketParameter>& parameters, int64_t cap_bytes, int ranks);

// The buckets, those of large parameters cut further between rows: so that no transfer is larger than `cap_bytes`, if a
// row a rank isn't. In the order of the buckets.
std::vector<Transfer> make_transfers(const std::vector<Bucket>& buckets, const std::vector<BucketParameter>& parameters,
                                     int64_t cap_bytes);

}  // namespace shardsmith
