// Leads: of all pairs of ranks that two processes have between them, those over which they say what
// concerns all of them. Whatever else a pair of ranks connects for is rows and signals of its own.
//
// Who has to be told what, and over which pair:
//   heartbeat  every other process, lest it takes this one for dead: the lead of the lowest team.
//   goodbye    the same. It says that all that this process sent has arrived and been acknowledged,
//              so it may overtake nothing that anybody waits for (Progress: Stop).
//   barrier    every other process, in each team: the leads. Whoever pushes kBarrier has seen all
//              of this process's endpoints quiet before.
//   failure    every process that may wait for one of our ranks, so every other one, in each team
//              since the blamed rank is one of a team. A notice over a new connection comes later,
//              and a full queue may hold it up, so it goes over every pair that was used, too.
// A rank that is no peer of any of ours is on our nodes, where the monitors tell each other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace jax_ep {

// A local rank and a peer of it.
struct PeerPair {
  uint32_t team = 0;
  uint32_t rank = 0;
  uint32_t peer = 0;
  uint32_t process = 0;  // the peer's, by LifeSigns; no pair inside of kOwn leads
};

struct LeadRole {
  bool is_lead = false;            // one pair for each team and other process
  bool carries_heartbeat = false;  // one of those for each other process
};

// The role of each pair, in their order. Both sides come to the same: of the pairs that join two
// processes in a team it is the one with the lowest rank of either side, then with the lowest of
// the other. Of a pair that is there several times, for each of the rank's proxies, it is the
// first.
std::vector<LeadRole> ChooseLeads(std::span<const PeerPair> pairs);

}  // namespace jax_ep
