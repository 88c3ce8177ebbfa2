#include "kernels/cpu/zones.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <vector>

namespace jax_ep {
namespace {

std::vector<int64_t> Zones(std::vector<int64_t> demand, int64_t align, int64_t recv_rows) {
  std::vector<int64_t> zones(demand.size(), -1);
  FillZones(demand, align, recv_rows, zones);
  return zones;
}

using Rows = std::vector<int64_t>;

TEST(Zones, WithoutShortageEveryExpertGetsItsAlignedDemand) {
  EXPECT_EQ(Zones({5, 0, 8, 1}, 4, 100), (Rows{8, 0, 8, 4}));
  EXPECT_EQ(Zones({5, 0, 8, 1}, 4, 20), (Rows{8, 0, 8, 4}));
}

TEST(Zones, WaterIsFilledEvenlyAndTheRestGoesInExpertOrder) {
  // 20 rows: a cap of 4 takes 16, then the first short expert gets the last block.
  EXPECT_EQ(Zones({16, 16, 2, 9}, 4, 20), (Rows{8, 4, 4, 4}));
  EXPECT_EQ(Zones({16, 16, 2, 9}, 4, 24), (Rows{8, 8, 4, 4}));
  EXPECT_EQ(Zones({1, 100, 100}, 1, 100), (Rows{1, 50, 49}));
}

TEST(Zones, LessThanOneBlockEachServesTheFirstExperts) {
  EXPECT_EQ(Zones({0, 3, 3, 3}, 8, 16), (Rows{0, 8, 8, 0}));
  EXPECT_EQ(Zones({3, 3}, 8, 0), (Rows{0, 0}));
  EXPECT_EQ(Zones({3, 3}, 8, 7), (Rows{0, 0}));
}

TEST(Zones, NoDemandNeedsNoRows) { EXPECT_EQ(Zones({0, 0}, 128, 0), (Rows{0, 0})); }

TEST(Zones, HoldForRandomDemands) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    Rows demand(1 + random() % 6);
    for (int64_t& rows : demand) rows = random() % 40;
    const int64_t align = 1 + random() % 5;
    const int64_t recv_rows = static_cast<int64_t>(random() % 40) * align;
    const Rows zones = Zones(demand, align, recv_rows);
    int64_t wanted = 0;
    for (size_t e = 0; e < demand.size(); ++e) {
      ASSERT_EQ(zones[e] % align, 0);
      ASSERT_LE(zones[e], AlignRows(demand[e], align));
      wanted += AlignRows(demand[e], align);
    }
    const int64_t used = std::accumulate(zones.begin(), zones.end(), int64_t{0});
    ASSERT_LE(used, recv_rows);
    // Nothing is left that an expert could use, and nobody has a block more than a short expert
    // could have had, but for the last round.
    if (wanted > recv_rows) {
      ASSERT_GT(used + align, recv_rows);
    }
    for (size_t e = 0; e < demand.size(); ++e) {
      if (zones[e] == AlignRows(demand[e], align)) continue;
      for (const int64_t other : zones) ASSERT_LE(other, zones[e] + align);
    }
  }
}

}  // namespace
}  // namespace jax_ep
