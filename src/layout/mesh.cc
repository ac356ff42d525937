#include "layout/mesh.h"

#include <algorithm>
#include <cassert>

#include "base/error.h"

namespace shardsmith {
namespace {

std::string letters(const std::string& placement) {
  if (placement == "cluster") return "DPT";
  if (placement == "spread") return "TPD";
  std::string sorted = placement;
  std::sort(sorted.begin(), sorted.end());
  if (sorted != "DPT") {
    fail(ErrorKind::kInvalidArgument, "placement '", placement,
         "' is neither \"cluster\" nor \"spread\" nor a permutation of the letters D, P, T");
  }
  return placement;
}

// "1, 2, 4": what `part` may be so that part * other divides whole.
std::string fitting(int whole, int other) {
  std::string list;
  for (int d = 1; other > 0 && d * other <= whole; ++d) {
    if (whole % (d * other) == 0) list += (list.empty() ? "" : ", ") + std::to_string(d);
  }
  return list.empty() ? "none" : list;
}

}  // namespace

Mesh::Mesh(int world_size, int pp, int tp, const std::string& placement)
    : pp_(pp), tp_(tp), rdp_(1), placement_(letters(placement)) {
  if (world_size < 1 || pp < 1 || tp < 1) {
    fail(ErrorKind::kInvalidArgument, "world size ", world_size, ", pipeline degree ", pp, " and tensor degree ", tp,
         " must each be at least 1");
  }
  if (int64_t{pp} * tp > world_size || world_size % (pp * tp) != 0) {
    fail(ErrorKind::kInvalidArgument, "pipeline degree ", pp, " x tensor degree ", tp, " = ", int64_t{pp} * tp,
         " does not divide the world size ", world_size, "; with tensor degree ", tp, " the pipeline degree can be ",
         fitting(world_size, tp), ", with pipeline degree ", pp, " the tensor degree can be ", fitting(world_size, pp));
  }
  rdp_ = world_size / (pp * tp);
}

Coordinates Mesh::coordinates(int rank) const {
  assert(rank >= 0 && rank < world_size());
  Coordinates c;
  for (size_t i = placement_.size(); i-- > 0;) {  // the right-most letter runs fastest
    const char letter = placement_[i];
    const int size = letter == 'P' ? pp_ : letter == 'T' ? tp_ : rdp_;
    (letter == 'P' ? c.pp : letter == 'T' ? c.tp : c.rdp) = rank % size;
    rank /= size;
  }
  return c;
}

int Mesh::rank(const Coordinates& c) const {
  int rank = 0;
  for (char letter : placement_) {
    const int size = letter == 'P' ? pp_ : letter == 'T' ? tp_ : rdp_;
    rank = rank * size + (letter == 'P' ? c.pp : letter == 'T' ? c.tp : c.rdp);
  }
  return rank;
}

std::vector<int> Mesh::pp_group(int rank) const {
  std::vector<int> group;
  Coordinates c = coordinates(rank);
  for (c.pp = 0; c.pp < pp_; ++c.pp) group.push_back(this->rank(c));
  return group;
}

std::vector<int> Mesh::tp_group(int rank) const {
  std::vector<int> group;
  Coordinates c = coordinates(rank);
  for (c.tp = 0; c.tp < tp_; ++c.tp) group.push_back(this->rank(c));
  return group;
}

std::vector<int> Mesh::rdp_group(int rank) const {
  std::vector<int> group;
  Coordinates c = coordinates(rank);
  for (c.rdp = 0; c.rdp < rdp_; ++c.rdp) group.push_back(this->rank(c));
  return group;
}

std::vector<int> Mesh::dp_group(int rank) const {
  std::vector<int> group;
  Coordinates c = coordinates(rank);
  for (c.rdp = 0; c.rdp < rdp_; ++c.rdp) {
    for (c.tp = 0; c.tp < tp_; ++c.tp) group.push_back(this->rank(c));
  }
  return group;
}

std::vector<int> Mesh::mp_group(int rank) const {
  std::vector<int> group;
  Coordinates c = coordinates(rank);
  for (c.pp = 0; c.pp < pp_; ++c.pp) {
    for (c.tp = 0; c.tp < tp_; ++c.tp) group.push_back(this->rank(c));
  }
  return group;
}

std::vector<int> Mesh::group(Kind kind, int rank) const {
  switch (kind) {
    case Kind::kPp:
      return pp_group(rank);
    case Kind::kTp:
      return tp_group(rank);
    case Kind::kRdp:
      return rdp_group(rank);
    case Kind::kDp:
      return dp_group(rank);
    case Kind::kMp:
      break;
  }
  return mp_group(rank);
}

std::vector<std::vector<int>> Mesh::groups(Kind kind) const {
  std::vector<std::vector<int>> all;
  std::vector<bool> seen(static_cast<size_t>(world_size()), false);
  for (int rank = 0; rank < world_size(); ++rank) {
    if (seen[static_cast<size_t>(rank)]) continue;
    all.push_back(group(kind, rank));  // its first member is its lowest rank, which is this one
    for (const int member : all.back()) seen[static_cast<size_t>(member)] = true;
  }
  return all;
}

}  // namespace shardsmith
