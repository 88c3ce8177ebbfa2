// Which pair of ranks two processes say things over: both must choose the same.
#include "proxy/leads.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace jax_ep {
namespace {

using Place = std::function<uint32_t(uint32_t rank)>;
// (team, lower rank, higher rank)
using Pair = std::tuple<uint32_t, uint32_t, uint32_t>;

struct Leads {
  std::set<Pair> all;
  std::set<Pair> heartbeats;
  bool operator==(const Leads&) const = default;
};

// What the process `own` chooses, by other process, in a group of `num_teams` equal teams.
std::map<uint32_t, Leads> ChoiceOf(uint32_t own, uint32_t num_ranks, uint32_t num_teams,
                                   const Place& process_of, const Place& node_of) {
  std::vector<PeerPair> pairs;
  std::vector<uint32_t> others;
  for (uint32_t team = 0; team < num_teams; ++team) {
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
      if (process_of(rank) != own) continue;
      for (uint32_t peer = 0; peer < num_ranks; ++peer) {
        if (node_of(rank) == node_of(peer)) continue;
        const uint32_t other = process_of(peer);
        // As LifeSigns numbers them: the own one is 0.
        pairs.push_back({team, rank, peer, other == own ? 0 : other + 1});
        others.push_back(other);
      }
    }
  }
  const std::vector<LeadRole> roles = ChooseLeads(pairs);
  EXPECT_EQ(roles.size(), pairs.size());
  std::map<uint32_t, Leads> choice;
  for (size_t i = 0; i < pairs.size(); ++i) {
    const PeerPair& pair = pairs[i];
    const Pair name{pair.team, std::min(pair.rank, pair.peer), std::max(pair.rank, pair.peer)};
    if (roles[i].is_lead) choice[others[i]].all.insert(name);
    if (roles[i].carries_heartbeat) choice[others[i]].heartbeats.insert(name);
    EXPECT_TRUE(roles[i].is_lead || !roles[i].carries_heartbeat);
    EXPECT_FALSE(pair.process == 0 && roles[i].is_lead);
  }
  return choice;
}

void ExpectBothSidesAgree(uint32_t num_ranks, uint32_t num_processes, uint32_t num_teams,
                          const Place& process_of, const Place& node_of) {
  std::map<uint32_t, std::map<uint32_t, Leads>> choices;
  for (uint32_t own = 0; own < num_processes; ++own) {
    choices[own] = ChoiceOf(own, num_ranks, num_teams, process_of, node_of);
  }
  for (const auto& [own, choice] : choices) {
    for (const auto& [other, leads] : choice) {
      EXPECT_EQ(leads.all.size(), num_teams);
      EXPECT_EQ(leads.heartbeats.size(), 1u);
      EXPECT_TRUE(choices[other][own] == leads) << own << " and " << other;
    }
  }
}

TEST(Leads, are_the_lowest_ranks_of_each) {
  const auto eight = [](uint32_t rank) { return rank / 8; };
  const auto choice = ChoiceOf(1, 24, 1, eight, eight);
  ASSERT_EQ(choice.size(), 2u);
  EXPECT_EQ(choice.at(0).all, (std::set<Pair>{{0, 0, 8}}));
  EXPECT_EQ(choice.at(2).heartbeats, (std::set<Pair>{{0, 8, 16}}));
}

TEST(Leads, are_chosen_alike_by_both_sides) {
  const auto by = [](uint32_t size) { return [size](uint32_t rank) { return rank / size; }; };
  const auto in_turn = [](uint32_t rank) { return rank % 4; };
  ExpectBothSidesAgree(32, 4, 1, by(8), by(8));
  ExpectBothSidesAgree(32, 4, 1, by(8), by(2));    // processes of several nodes
  ExpectBothSidesAgree(32, 16, 3, by(2), by(8));   // nodes of several processes, teams
  ExpectBothSidesAgree(24, 8, 1, by(3), by(4));    // borders of both in different places
  ExpectBothSidesAgree(24, 4, 2, in_turn, by(4));  // a process's ranks far apart
}

}  // namespace
}  // namespace jax_ep
