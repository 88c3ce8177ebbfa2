#include "xla_ffi/departure.h"

#include <algorithm>
#include <string>

#include "proxy/blame.h"

namespace jax_ep {

Departed PeerHasLeft(const std::string& group_name, const TeamId& team, uint32_t rank,
                     Departure departure, uint32_t user) {
  const std::string who = "group " + group_name + ": " + RankName(team, rank);
  if (departure == Departure::kAgrees) {
    return {.blamed = FailureLatch::kAgreement,
            .status = FailedPrecondition(who + std::string(kAgreesAnew))};
  }
  return {.blamed = RankOfTeam(team.index, rank),
          .status = FailedPrecondition(departure == Departure::kProgramEnded
                                           ? who + " closed it: its program ended"
                                           : who + " closed the group while " +
                                                 RankName(team, user) + " still used it")};
}

const MonitorOptions::Peer* FindDeparted(std::span<const MonitorOptions::Peer> mates) {
  const auto it = std::find_if(mates.begin(), mates.end(), [](const MonitorOptions::Peer& mate) {
    // Acquire pairs with the release in Monitor::Leave.
    return mate.control->state.load(std::memory_order_acquire) == MemberState::kClosed;
  });
  return it == mates.end() ? nullptr : &*it;
}

}  // namespace jax_ep
