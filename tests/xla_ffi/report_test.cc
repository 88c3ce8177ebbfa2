// Who hangs: whom FindCulprit names, and what the page says of each rank.
#include "xla_ffi/report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>

#include "xla_ffi/elsewhere.h"
#include "xla_ffi/lifecycle.h"

namespace jax_ep {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint64_t kNow = 100 * kSecond;

std::string NoLine(uint64_t) { return ""; }

// Four visible ranks that work since a second ago, each of a process of its own.
TeamView FourRanks() {
  TeamView team{.id = {}, .node_size = 4, .ranks = {}};
  for (uint32_t rank = 0; rank < 4; ++rank) {
    team.ranks.push_back({.process = rank,
                          .pid = 1000 + rank,
                          .is_visible = true,
                          .num_calls = 5,
                          .num_enqueued = 5,
                          .phase = Phase::kWorking,
                          .since_ns = kNow - kSecond,
                          .beat_ns = kNow,
                          .operation = "dispatch"});
  }
  return team;
}

void LetWait(TeamView& team, uint32_t rank, uint32_t for_whom, uint64_t seconds) {
  RankView& view = team.ranks[rank];
  view.phase = Phase::kAwaitsSignal;
  view.channel = Channel::kDispatch;
  view.awaited = for_whom;
  view.since_ns = kNow - seconds * kSecond;
}

void LetSit(TeamView& team, uint32_t rank) {  // in Python
  team.ranks[rank].phase = Phase::kBetweenCalls;
  team.ranks[rank].num_calls = team.ranks[rank].num_enqueued = 4;
}

Culprit MustFind(const TeamView& team) {
  const std::optional<Culprit> culprit = FindCulprit(team, kNow, NoLine);
  EXPECT_TRUE(culprit.has_value());
  return culprit.value_or(Culprit{});
}

TEST(FindCulprit, follows_the_longest_wait_to_its_end) {
  TeamView team = FourRanks();
  LetWait(team, 0, 1, 9);
  LetWait(team, 1, 3, 8);
  LetWait(team, 2, 0, 7);
  LetSit(team, 3);
  const Culprit culprit = MustFind(team);
  EXPECT_EQ(culprit.rank, 3u);
  EXPECT_EQ(culprit.victim, 0u);
  EXPECT_EQ(culprit.wait_ns, 9 * kSecond);
  EXPECT_NE(culprit.why.find("it has not made call 5, dispatch"), std::string::npos) << culprit.why;
  EXPECT_EQ(CulpritText(team, culprit).find("rank 3 (process 3) has kept rank 0 waiting for 9.0 s"),
            0u);
}

TEST(FindCulprit, names_the_rank_whose_proxy_takes_nothing_instead_of_a_circle) {
  TeamView team = FourRanks();
  LetWait(team, 0, 2, 3);
  LetWait(team, 2, 0, 2);
  team.ranks[2].num_untaken = 7;
  const Culprit culprit = MustFind(team);
  EXPECT_EQ(culprit.rank, 2u);
  EXPECT_EQ(culprit.victim, 0u);
  EXPECT_EQ(culprit.why.find("its proxy has not taken 7 of its commands"), 0u) << culprit.why;
  EXPECT_NE(RankLines(team, kNow, NoLine).find("; its proxy has not taken 7 of its commands\n"),
            std::string::npos);
}

TEST(FindCulprit, says_of_a_rank_in_another_node_that_the_own_proxy_may_be_it) {
  TeamView team = FourRanks();
  LetWait(team, 1, 3, 5);
  team.ranks[3].is_visible = false;
  EXPECT_EQ(MustFind(team).why.find("the proxy of"), std::string::npos);
  team.ranks[1].num_untaken = 4;
  EXPECT_NE(MustFind(team).why.find("the proxy of rank 1 has not taken 4 of its commands"),
            std::string::npos);
}

// Ranks on GPUs, of which only those that wait say what they are in.
TeamView FourGpus() {
  TeamView team = FourRanks();
  for (RankView& rank : team.ranks) {
    rank.on_gpu = true;
    rank.phase = Phase::kBetweenCalls;
    rank.num_calls = 0;
    rank.num_enqueued = 7;
    rank.enqueued_ns = kNow - 2 * kSecond;
    rank.enqueued_site = 1;
    rank.enqueued_operation = "combine";
  }
  return team;
}

TEST(FindCulprit, on_gpus_names_the_rank_that_is_waited_for_and_its_newest_call) {
  TeamView team = FourGpus();
  EXPECT_FALSE(FindCulprit(team, kNow, NoLine).has_value());
  LetWait(team, 2, 3, 6);
  team.ranks[2].num_calls = 9;
  const auto culprit =
      FindCulprit(team, kNow, [](uint64_t site) { return site == 1 ? "train.py:45" : ""; });
  ASSERT_TRUE(culprit.has_value());
  EXPECT_EQ(CulpritText(team, culprit),
            "rank 3 (process 3) has kept rank 2 waiting for 6.0 s: no call of it is known to wait; "
            "its host has enqueued 7, the newest 2.0 s ago: combine at train.py:45");
  EXPECT_NE(RankLines(team, kNow, NoLine).find("call 9, dispatch: waits for rank 3 for 6.0 s\n"),
            std::string::npos);
}

TEST(FindCulprit, on_gpus_a_rank_whose_proxy_takes_nothing_waits_for_itself) {
  TeamView team = FourGpus();
  LetWait(team, 1, 1, 4);
  team.ranks[1].phase = Phase::kAwaitsRing;
  const Culprit culprit = MustFind(team);
  EXPECT_EQ(culprit.rank, 1u);
  EXPECT_NE(culprit.why.find("its proxy takes nothing"), std::string::npos) << culprit.why;
}

// A rank signals itself for one that takes no part.
TEST(FindCulprit, names_nobody_who_takes_no_part) {
  TeamView team = FourRanks();
  team.active = {1, 1, 0, 1};
  team.ranks[2] = {};
  for (RankView& rank : team.ranks) rank.on_gpu = true;
  LetWait(team, 0, 1, 9);
  LetWait(team, 1, 2, 8);
  const Culprit culprit = MustFind(team);
  EXPECT_EQ(culprit.rank, 1u);
  EXPECT_EQ(culprit.victim, 0u);
}

TEST(PageOf, has_the_longest_wait_of_all_teams_in_its_first_line) {
  std::map<uint32_t, TeamView> teams{{0, FourRanks()}, {1, FourRanks()}};
  for (auto& [index, team] : teams) team.id = {.index = index, .num_teams = 2};
  LetWait(teams[0], 0, 1, 3);
  LetWait(teams[1], 2, 3, 4);
  const Page page = PageOf(teams, kNow, NoLine);
  EXPECT_EQ(page.culprit.find("rank 3 of team 1 (process 3) has kept rank 2 of team 1 waiting"), 0u)
      << page.culprit;
  EXPECT_EQ(std::count(page.lines.begin(), page.lines.end(), '\n'), 8);
  EXPECT_EQ(PageOf({}, kNow, NoLine).culprit, "nobody is waiting");
}

TEST(PageClaims, each_wait_gets_one_page_and_one_process_of_the_node_writes_it) {
  std::atomic<uint64_t> of_node{0};
  PageClaims one, other;
  EXPECT_TRUE(one.Claim(kSecond, kNow, of_node));
  EXPECT_FALSE(one.Claim(2 * kSecond, kNow + kSecond, of_node));    // the same wait
  EXPECT_FALSE(other.Claim(2 * kSecond, kNow + kSecond, of_node));  // its node has one
  EXPECT_TRUE(other.Claim(kSecond, kNow + 5 * kSecond, of_node));   // a later wait
  std::atomic<uint64_t> of_other_node{0};
  EXPECT_FALSE(other.Claim(2 * kSecond, kNow + 6 * kSecond, of_other_node));
}

TEST(FindCulprit, names_a_circle) {
  TeamView team = FourRanks();
  LetWait(team, 0, 1, 3);
  LetWait(team, 1, 0, 2);
  EXPECT_NE(MustFind(team).why.find("wait for each other in a circle"), std::string::npos);
}

TEST(ViewOf, tells_who_agrees_from_who_was_told_only) {
  const auto agrees = [](MemberState state, Departure departure) {
    ControlBlock control{};
    control.departure.store(departure, std::memory_order_relaxed);
    control.state.store(state, std::memory_order_release);
    return ViewOf(control, [](Channel, uint32_t) { return uint64_t{0}; }).agrees;
  };
  EXPECT_TRUE(agrees(MemberState::kRunning, Departure::kAgrees));
  EXPECT_TRUE(agrees(MemberState::kAgrees, Departure::kAgrees));
  EXPECT_TRUE(agrees(MemberState::kClosed, Departure::kAgrees));  // for its next session
  EXPECT_FALSE(agrees(MemberState::kAgrees, Departure::kClosed));
  EXPECT_FALSE(agrees(MemberState::kFailed, Departure::kAgrees));
  EXPECT_FALSE(agrees(MemberState::kRunning, Departure::kClosed));
}

TEST(FindCulprit, stops_at_who_is_silent_has_failed_or_left) {
  TeamView team = FourRanks();
  LetWait(team, 0, 1, 6);
  LetWait(team, 1, 2, 6);
  const auto expect = [&team](const std::string& words) {
    const Culprit culprit = MustFind(team);
    EXPECT_EQ(culprit.rank, 1u);
    EXPECT_NE(culprit.why.find(words), std::string::npos) << culprit.why;
  };
  team.ranks[1].agrees = true;
  expect("its process agrees anew with the others");
  team.ranks[1].agrees = false;
  team.ranks[1].state = MemberState::kAgrees;
  expect("was told that others agree anew, and has not called group.agree");
  team.ranks[1].state = MemberState::kRunning;
  team.ranks[1].beat_ns = kNow - 5 * kSecond;
  expect("silent for 5.0 s");
  team.ranks[1].state = MemberState::kFailed;
  expect("its process has failed");
  team.ranks[1].state = MemberState::kClosed;
  expect("it has closed the group");
  team.ranks[1].is_visible = false;
  expect("it is in another node");
}

TEST(FindCulprit, who_waits_in_its_close_is_not_the_one) {
  TeamView team = FourRanks();
  for (const uint32_t rank : {0u, 2u, 3u}) {
    LetWait(team, rank, 1, 4);
    team.ranks[rank].phase = Phase::kAwaitsBarrier;
    team.ranks[rank].state = MemberState::kClosed;
  }
  LetSit(team, 1);
  const Culprit culprit = MustFind(team);
  EXPECT_EQ(culprit.rank, 1u);
  EXPECT_NE(culprit.why.find("it has not come to that point of create_group or close"),
            std::string::npos);
}

TEST(FindCulprit, a_rank_whose_calls_wait_for_their_turn_waits_for_rank_zero) {
  TeamView team = FourRanks();
  for (RankView& rank : team.ranks) rank.phase = Phase::kBetweenCalls;
  team.ranks[2].num_enqueued = 7;
  team.ranks[2].turn_since_ns = kNow - 3 * kSecond;
  team.ranks[2].since_ns = kNow - 8 * kSecond;  // its turn could not come before
  const Culprit culprit = MustFind(team);
  EXPECT_EQ(culprit.rank, 0u);
  EXPECT_EQ(culprit.victim, 2u);
  EXPECT_EQ(culprit.wait_ns, 3 * kSecond);
  team.ranks[2].next_is_announced = true;  // but that call is not among its own
  EXPECT_EQ(MustFind(team).rank, 2u);
}

TEST(FindCulprit, is_who_works_longest_where_nobody_waits) {
  TeamView team = FourRanks();
  team.ranks[1].since_ns = kNow - 4 * kSecond;
  const Culprit culprit = MustFind(team);
  EXPECT_EQ(culprit.rank, 1u);
  EXPECT_EQ(CulpritText(team, culprit).find("rank 1 (process 1) has not gone on for 4.0 s"), 0u);
  for (RankView& rank : team.ranks) rank.phase = Phase::kBetweenCalls;
  EXPECT_FALSE(FindCulprit(team, kNow, NoLine).has_value());
  EXPECT_EQ(CulpritText(team, std::nullopt), "nobody is waiting");
}

// Groups that are closed in opposite orders blamed each other "in no call".
TEST(FindCulprit, says_what_the_process_is_in_beside_calls) {
  TeamView team = FourRanks();
  LetWait(team, 0, 1, 3);
  team.ranks[0].phase = Phase::kAwaitsBarrier;
  LetSit(team, 1);
  team.ranks[1].elsewhere = PackStay(Stay::kClose, 2);
  EXPECT_EQ(MustFind(team).why,
            "it has not come to that point of create_group or close; in no call for 1.0 s since "
            "call 4, dispatch; its process is in close of group #2");
  team.ranks[1].on_gpu = true;
  team.ranks[1].elsewhere = PackStay(Stay::kAgree, 7);
  EXPECT_NE(MustFind(team).why.find("; its process is in agree of group #7"), std::string::npos);
  EXPECT_EQ(StayText(PackStay(Stay::kCreateGroup, 3)), "create_group of group #3");
  EXPECT_EQ(StayText(uint64_t{9} << 32), "");
}

TEST(Elsewhere, has_room_for_some_and_shows_one) {
  Elsewhere elsewhere;
  EXPECT_EQ(elsewhere.Get(), 0u);
  const size_t first = elsewhere.Begin(Stay::kClose, 1);
  for (size_t i = 1; i < Elsewhere::kPlaces; ++i) elsewhere.Begin(Stay::kAgree, 2);
  const size_t none = elsewhere.Begin(Stay::kClose, 3);
  EXPECT_EQ(elsewhere.Get(), PackStay(Stay::kClose, 1));
  elsewhere.End(none);
  elsewhere.End(first);
  EXPECT_EQ(elsewhere.Get(), PackStay(Stay::kAgree, 2));
}

// The dead rank's line did not say that it was gone, and its last call went on for ever.
TEST(RankLines, say_of_a_process_that_has_ended_that_it_is_gone) {
  TeamView team = FourRanks();
  LetWait(team, 0, 1, 3);
  team.ranks[1].is_gone = true;
  team.ranks[1].beat_ns = kNow - 5 * kSecond;
  EXPECT_EQ(MustFind(team).rank, 1u);
  EXPECT_EQ(MustFind(team).why, "it is gone, its process has ended; its newest: call 5, dispatch");
  const std::string line =
      "  rank 1, process 1, pid 1001: gone, its process has ended; its newest: call 5, dispatch\n";
  EXPECT_NE(RankLines(team, kNow, NoLine).find(line), std::string::npos);
  team.ranks[1].state = MemberState::kClosed;  // in peace
  EXPECT_EQ(RankLines(team, kNow, NoLine).find("gone"), std::string::npos);
}

// The rank that printed the page stood in front, and who had failed behind it.
TEST(StateLine, has_what_failed_first_in_front) {
  const std::string failure = "group ep[2]#1: rank 1 (pid 7) is gone: its process has ended";
  EXPECT_EQ(StateLine("ep[2]#1", "nobody is waiting", ""), "group ep[2]#1: nobody is waiting\n");
  EXPECT_EQ(StateLine("ep[2]#1", "", failure, " on GPUs"),
            "group ep[2]#1 on GPUs: FAILED: rank 1 (pid 7) is gone: its process has ended\n");
  // Texts of a close, and of another group, are left whole.
  for (const std::string whole :
       {"group ep[2]#1 was closed while call 5 of rank 0 ran; it did not end within timeout_s",
        "group ep[2]#1 was closed while a call had reached some ranks of process 0 only (rank 0: 1 "
        "calls; rank 1: 0 calls; wait for the results before close)",
        "group ep[2]#2: rank 1 is gone"}) {
    EXPECT_EQ(StateLine("ep[2]#1", "", whole), "group ep[2]#1: FAILED: " + whole + "\n");
  }
  EXPECT_EQ(StateLine("ep[2]#1", "closed", "process 1 failed"),
            "group ep[2]#1: FAILED: process 1 failed (closed)\n");
}

// Somebody was said to have kept another one waiting for 0.0 s.
TEST(FindCulprit, is_nobody_after_moments) {
  TeamView team = FourRanks();
  for (RankView& rank : team.ranks) rank.since_ns = kNow - kSecond / 25;
  EXPECT_FALSE(FindCulprit(team, kNow, NoLine).has_value());
  LetWait(team, 0, 1, 0);
  team.ranks[0].since_ns = kNow - kSecond / 25;
  EXPECT_FALSE(FindCulprit(team, kNow, NoLine).has_value());
  team.ranks[0].since_ns = kNow - kSecond / 20;
  EXPECT_EQ(CulpritText(team, MustFind(team))
                .find("rank 1 (process 1) has kept rank 0 waiting for "
                      "0.1 s"),
            0u);
}

TEST(RankLines, say_what_each_rank_does_and_where) {
  TeamView team = FourRanks();
  LetWait(team, 0, 1, 2);
  team.ranks[0].site = 7;
  team.ranks[0].epoch = 3;
  team.ranks[0].signal = 3;
  team.ranks[0].arrived = 2;
  LetSit(team, 1);
  team.ranks[2].phase = Phase::kAwaitsRing;
  team.ranks[2].awaited = 3;
  team.ranks[3].is_visible = false;
  const auto line = [](uint64_t site) { return site == 7 ? "train.py:42" : ""; };
  EXPECT_EQ(
      RankLines(team, kNow, line),
      "  rank 0, process 0, pid 1000: call 5, dispatch epoch 3 at train.py:42: waits for rank "
      "1 for 2.0 s (dispatch signal 3, arrived 2)\n"
      "  rank 1, process 1, pid 1001: in no call for 1.0 s since call 4, dispatch\n"
      "  rank 2, process 2, pid 1002: call 5, dispatch: waits for 1.0 s for space in the "
      "command ring, to send to rank 3 (order)\n"
      "  rank 3, process 3, pid 1003: in another node; this one knows only the flows below\n");
}

}  // namespace
}  // namespace jax_ep
