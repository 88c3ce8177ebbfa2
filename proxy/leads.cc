#include "proxy/leads.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <tuple>
#include <utility>

#include "proxy/life_signs.h"

namespace jax_ep {
namespace {

// The same on both sides, which have rank and peer the other way round.
auto Order(const PeerPair& pair) {
  return std::tuple(pair.team, std::min(pair.rank, pair.peer), std::max(pair.rank, pair.peer));
}

}  // namespace

std::vector<LeadRole> ChooseLeads(std::span<const PeerPair> pairs) {
  std::map<std::pair<uint32_t, uint32_t>, size_t> leads;  // by (process, team): indexes of pairs
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (pairs[i].process == LifeSigns::kOwn) continue;
    const auto [lead, is_new] = leads.try_emplace({pairs[i].process, pairs[i].team}, i);
    if (!is_new && Order(pairs[i]) < Order(pairs[lead->second])) lead->second = i;
  }
  std::vector<LeadRole> roles(pairs.size());
  uint32_t last_process = LifeSigns::kOwn;
  // Teams of a process follow each other, the lowest first.
  for (const auto& [key, index] : leads) {
    roles[index] = {.is_lead = true, .carries_heartbeat = key.first != last_process};
    last_process = key.first;
  }
  return roles;
}

}  // namespace jax_ep
