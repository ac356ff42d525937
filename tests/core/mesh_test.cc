#include "layout/mesh.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

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
