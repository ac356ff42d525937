// Mesh: degrees and placement -> each rank's coordinates and each group's members. A pure value.
//
// pp: pipeline stage; tp: tensor-parallel slice; rdp: ranks that hold the same slice;
// dp: all ranks of one stage (rdp x tp); mp: one whole replica (pp x tp).
#pragma once

#include <string>
#include <vector>

namespace shardsmith {

struct Coordinates {
  int pp = 0, tp = 0, rdp = 0;
  bool operator==(const Coordinates&) const = default;
};

class Mesh {
 public:
  // `placement`: "cluster" (= "DPT"), "spread" (= "TPD") or a permutation of D, P, T; the right-most
  // letter runs fastest over global ranks, D is the reduced data parallelism. Throws kInvalidArgument,
  // with the degrees that would work, unless pp * tp divides world_size.
  Mesh(int world_size, int pp, int tp, const std::string& placement = "cluster");

  int world_size() const { return pp_ * tp_ * rdp_; }
  int pp_size() const { return pp_; }
  int tp_size() const { return tp_; }
  int rdp_size() const { return rdp_; }
  int dp_size() const { return rdp_ * tp_; }
  int mp_size() const { return pp_ * tp_; }
  const std::string& placement() const { return placement_; }

  Coordinates coordinates(int rank) const;
  int rank(const Coordinates& c) const;
  // Members of the group that `rank` belongs to, ascending by the group's own coordinate
  // (dp: rdp-major, tp runs fastest; mp: pp-major, tp runs fastest).
  std::vector<int> pp_group(int rank) const;
  std::vector<int> tp_group(int rank) const;
  std::vector<int> rdp_group(int rank) const;
  std::vector<int> dp_group(int rank) const;
  std::vector<int> mp_group(int rank) const;

  enum class Kind { kPp, kTp, kRdp, kDp, kMp };
  // All groups of a kind, each rank in exactly one; each group's members as above, groups by their first member.
  std::vector<std::vector<int>> groups(Kind kind) const;

 private:
  std::vector<int> group(Kind kind, int rank) const;

  int pp_, tp_, rdp_;
  std::string placement_;  // a permutation of D, P, T
};

}  // namespace shardsmith
