#include "layout/mesh.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <set>
#include <tuple>

#include "base/error.h"

namespace shardsmith {
namespace {

using Ranks = std::vector<int>;

TEST(Mesh, ClusterPutsTensorParallelRanksNextToEachOther) {
  const Mesh mesh(8, 2, 2);
  EXPECT_EQ(mesh.placement(), "DPT");
  EXPECT_EQ(mesh.rdp_size(), 2);
  EXPECT_EQ(mesh.coordinates(5), (Coordinates{.pp = 0, .tp = 1, .rdp = 1}));
  EXPECT_EQ(mesh.tp_group(5), (Ranks{4, 5}));
  EXPECT_EQ(mesh.pp_group(5), (Ranks{5, 7}));
  EXPECT_EQ(mesh.rdp_group(5), (Ranks{1, 5}));
  EXPECT_EQ(mesh.dp_group(5), (Ranks{0, 1, 4, 5}));
  EXPECT_EQ(mesh.mp_group(5), (Ranks{4, 5, 6, 7}));
}

TEST(Mesh, SpreadPutsReplicasNextToEachOther) {
  const Mesh mesh(8, 2, 2, "spread");
  EXPECT_EQ(mesh.placement(), "TPD");
  EXPECT_EQ(mesh.rdp_group(0), (Ranks{0, 1}));
  EXPECT_EQ(mesh.pp_group(0), (Ranks{0, 2}));
  EXPECT_EQ(mesh.tp_group(0), (Ranks{0, 4}));
  EXPECT_EQ(mesh.dp_group(0), (Ranks{0, 4, 1, 5}));  // rdp-major, tp runs fastest
}

// Every rank in exactly one group of each kind, which is the one that it is told; sizes right.
void check_groups(const Mesh& mesh) {
  using Of = Ranks (Mesh::*)(int) const;
  const std::tuple<Mesh::Kind, Of, int> kinds[] = {{Mesh::Kind::kPp, &Mesh::pp_group, mesh.pp_size()},
                                                   {Mesh::Kind::kTp, &Mesh::tp_group, mesh.tp_size()},
                                                   {Mesh::Kind::kRdp, &Mesh::rdp_group, mesh.rdp_size()},
                                                   {Mesh::Kind::kDp, &Mesh::dp_group, mesh.dp_size()},
                                                   {Mesh::Kind::kMp, &Mesh::mp_group, mesh.mp_size()}};
  for (const auto& [kind, of, size] : kinds) {
    Ranks all;
    int before = -1;
    for (const Ranks& group : mesh.groups(kind)) {
      EXPECT_EQ(group.size(), static_cast<size_t>(size));
      EXPECT_GT(group.front(), before) << "groups by their first member";
      before = group.front();
      // The members agree on it. Of large groups a few tell.
      for (size_t i = 0; i < group.size(); i += std::max<size_t>(1, group.size() / 3)) {
        EXPECT_EQ((mesh.*of)(group[i]), group);
      }
      all.insert(all.end(), group.begin(), group.end());
    }
    std::sort(all.begin(), all.end());
    Ranks every(static_cast<size_t>(mesh.world_size()));
    std::iota(every.begin(), every.end(), 0);
    EXPECT_EQ(all, every);
  }
}

TEST(Mesh, AHundredThousandRanksTakeNoTime) {
  std::string letters = "DPT";
  do {
    const auto begin = std::chrono::steady_clock::now();
    const Mesh mesh(100000, 20, 8, letters);
    size_t groups = 0;
    for (const Mesh::Kind kind : {Mesh::Kind::kPp, Mesh::Kind::kTp, Mesh::Kind::kRdp, Mesh::Kind::kDp, Mesh::Kind::kMp})
      groups += mesh.groups(kind).size();
    for (int rank = 0; rank < mesh.world_size(); ++rank) ASSERT_EQ(mesh.rank(mesh.coordinates(rank)), rank);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::printf("100,000 ranks as %s: %zu groups, %.0f ms\n", letters.c_str(), groups, seconds * 1000);
    EXPECT_EQ(groups, 5000u + 12500 + 160 + 20 + 625);
    EXPECT_LT(seconds, 10);  // ten times what is promised, for sanitizers and busy machines
  } while (std::next_permutation(letters.begin(), letters.end()));
  check_groups(Mesh(100000, 1, 1));
  check_groups(Mesh(100000, 100000, 1));
  check_groups(Mesh(100000, 10, 10, "spread"));
}

TEST(Mesh, EveryPlacementOfEveryDegreeIsConsistent) {
  std::string letters = "DPT";
  do {
    for (int pp = 1; pp <= 4; ++pp) {
      for (int tp = 1; tp <= 3; ++tp) {
        for (int rdp = 1; rdp <= 3; ++rdp) {
          const Mesh mesh(pp * tp * rdp, pp, tp, letters);
          for (int r = 0; r < mesh.world_size(); ++r) {
            const Coordinates c = mesh.coordinates(r);
            ASSERT_EQ(mesh.rank(c), r) << letters;
            EXPECT_EQ(mesh.pp_group(r)[static_cast<size_t>(c.pp)], r);
            EXPECT_EQ(mesh.tp_group(r)[static_cast<size_t>(c.tp)], r);
            EXPECT_EQ(mesh.rdp_group(r)[static_cast<size_t>(c.rdp)], r);
            EXPECT_EQ(mesh.dp_group(r)[static_cast<size_t>(c.rdp * tp + c.tp)], r);
            EXPECT_EQ(mesh.mp_group(r)[static_cast<size_t>(c.pp * tp + c.tp)], r);
            for (int other : mesh.dp_group(r)) EXPECT_EQ(mesh.coordinates(other).pp, c.pp);
            for (int other : mesh.mp_group(r)) EXPECT_EQ(mesh.coordinates(other).rdp, c.rdp);
          }
          check_groups(mesh);
          // The right-most letter runs fastest.
          const int fastest = letters[2] == 'P' ? pp : letters[2] == 'T' ? tp : rdp;
          if (fastest > 1) {
            const Coordinates c = mesh.coordinates(1);
            EXPECT_EQ(letters[2] == 'P' ? c.pp : letters[2] == 'T' ? c.tp : c.rdp, 1);
          }
        }
      }
    }
  } while (std::next_permutation(letters.begin(), letters.end()));
}

TEST(Mesh, WrongDegreesNameTheOnesThatWork) {
  try {
    Mesh(8, 3, 2);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
    const std::string text = e.what();
    EXPECT_NE(text.find("does not divide the world size 8"), std::string::npos) << text;
    EXPECT_NE(text.find("pipeline degree can be 1, 2, 4"), std::string::npos) << text;
  }
  EXPECT_THROW(Mesh(2, 4, 1), Error);
  EXPECT_THROW(Mesh(2, 0, 1), Error);
  EXPECT_THROW(Mesh(2, 1, 1, "DPX"), Error);
  EXPECT_THROW(Mesh(2, 1, 1, "DDT"), Error);
  EXPECT_THROW(Mesh(8, 1 << 20, 1 << 20), Error);  // the product overflows an int
}

}  // namespace
}  // namespace shardsmith
