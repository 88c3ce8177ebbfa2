// What holds for the members of each kind of session and of a GpuNetwork: a member is one local
// rank, its `id`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "xla_ffi/monitor.h"
#include "xla_ffi/session_options.h"

namespace jax_ep {

template <typename Member>
using Members = std::vector<std::unique_ptr<Member>>;

// That rank of the team, or null if it does not live in this process.
template <typename Member>
Member* FindMember(const Members<Member>& members, uint32_t team, uint32_t rank) {
  const auto it = std::find_if(members.begin(), members.end(), [&](const auto& member) {
    return member->id.team == team && member->id.rank == rank;
  });
  return it == members.end() ? nullptr : it->get();
}

// The rank on that device, or null.
template <typename Member>
Member* FindMemberOn(const Members<Member>& members, int64_t device_ordinal) {
  const auto it = std::find_if(members.begin(), members.end(), [&](const auto& member) {
    return member->id.device_ordinal == device_ordinal;
  });
  return it == members.end() ? nullptr : it->get();
}

// For the monitor of a session's members, which have a `control_block()` and the mates `watched`.
template <typename Member>
MonitorOptions MonitorOptionsFor(const SessionOptions& options, const Members<Member>& members) {
  MonitorOptions monitor{.group_name = options.name,
                         .num_teams = options.IdOf(0).num_teams,
                         .peer_timeout = options.peer_timeout};
  for (const auto& member : members) {
    monitor.own.push_back(member->control_block());
    monitor.peers.insert(monitor.peers.end(), member->watched.begin(), member->watched.end());
  }
  return monitor;
}

}  // namespace jax_ep
