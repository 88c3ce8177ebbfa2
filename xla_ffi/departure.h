// Ranks that have left the group, as those see it who still need them.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "proxy/base/rank_name.h"
#include "xla_ffi/monitor.h"

namespace jax_ep {

// The failure of a call that needs a rank which has left.
struct Departed {
  int64_t blamed;  // RankOfTeam, or kAgreement
  Status status;   // "group NAME: rank 3 closed it: its program ended", or "... closed the group
                   // while rank 0 still used it", or kAgreesAnew
};
// `user`: the rank of the same team that needs `rank`. By name, as the text reaches processes that
// host neither of them.
Departed PeerHasLeft(const std::string& group_name, const TeamId& team, uint32_t rank,
                     Departure departure, uint32_t user);

// The first of `mates`, node-mates of other processes, that has closed the group; null if none has.
// Allocates nothing.
const MonitorOptions::Peer* FindDeparted(std::span<const MonitorOptions::Peer> mates);

}  // namespace jax_ep
