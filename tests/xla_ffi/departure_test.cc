// Who has left, and how those are told who still need it.
#include "xla_ffi/departure.h"

#include <gtest/gtest.h>

#include <vector>

namespace jax_ep {
namespace {

TEST(FindDeparted, looks_at_the_mates_that_it_is_given_only) {
  ControlBlock running{}, closed{};
  closed.departure.store(Departure::kProgramEnded, std::memory_order_relaxed);
  closed.state.store(MemberState::kClosed, std::memory_order_release);
  const std::vector<MonitorOptions::Peer> team_0 = {{.team = 0, .rank = 1, .control = &closed}};
  const std::vector<MonitorOptions::Peer> team_1 = {{.team = 1, .rank = 1, .control = &running}};
  EXPECT_EQ(FindDeparted(team_1), nullptr);
  EXPECT_EQ(FindDeparted(team_0), team_0.data());
  EXPECT_EQ(FindDeparted({}), nullptr);
}

TEST(FindDeparted, a_mate_that_has_failed_has_not_left) {
  ControlBlock failed{};
  failed.state.store(MemberState::kFailed, std::memory_order_release);
  const std::vector<MonitorOptions::Peer> mates = {{.rank = 1, .control = &failed}};
  EXPECT_EQ(FindDeparted(mates), nullptr);
}

TEST(PeerHasLeft, blames_and_names_the_rank_with_its_team) {
  const Departed ended =
      PeerHasLeft("g", {.index = 1, .num_teams = 2}, 3, Departure::kProgramEnded, /*user=*/0);
  EXPECT_EQ(ended.blamed, RankOfTeam(1, 3));
  EXPECT_EQ(ended.status.message(), "group g: rank 3 of team 1 closed it: its program ended");
  const Departed closed = PeerHasLeft("g", {}, 3, Departure::kClosed, /*user=*/0);
  EXPECT_EQ(closed.blamed, 3);
  // It said "this process" also in the log of the one that had closed it, whom it reaches.
  EXPECT_EQ(closed.status.message(), "group g: rank 3 closed the group while rank 0 still used it");
  const Departed agrees = PeerHasLeft("g", {}, 3, Departure::kAgrees, /*user=*/0);
  EXPECT_EQ(agrees.blamed, FailureLatch::kAgreement);
  EXPECT_TRUE(agrees.status.message().starts_with("group g: rank 3 says that the processes"))
      << agrees.status.message();
}

}  // namespace
}  // namespace jax_ep
