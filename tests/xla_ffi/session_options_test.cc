#include "xla_ffi/session_options.h"

#include <gtest/gtest.h>

namespace jax_ep {
namespace {

TEST(PlaceOf, counts_the_ranks_of_all_teams_on_this_host) {
  // Two teams of four ranks over two hosts; this host has ranks 2 and 3 of both.
  const SessionOptions options{.host_ranks = {{0, 2}, {0, 3}, {1, 2}, {1, 3}}};
  uint32_t index = 0;
  for (const auto& [team, rank] : options.host_ranks) {
    const RankPlace place = PlaceOf(options, LocalRank{.team = team, .rank = rank});
    EXPECT_EQ(place.local_index, index++);
    EXPECT_EQ(place.num_local, 4u);
    EXPECT_EQ(place.device_pci, "");
  }
}

TEST(PlaceOf, is_unknown_for_a_rank_that_the_host_does_not_list) {
  EXPECT_EQ(PlaceOf(SessionOptions{}, LocalRank{}).num_local, 0u);
}

}  // namespace
}  // namespace jax_ep
