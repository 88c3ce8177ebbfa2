// Blame: whom a rank blames for a failure, as ImmControl::kFailed says it in 13 bits to the ranks
// of its team. They name the same rank, of whatever team of the group it is: who is in both teams
// may hear of it by this message first.
#pragma once

#include <cstdint>

#include "proxy/abi/imm.h"
#include "proxy/base/failure.h"

namespace jax_ep {

// blamed: RankOfTeam, FailureLatch::kNobody or kUnnamed. Groups of 8,190 ranks in all their teams
// have room for each of them.
constexpr uint32_t BlamePayload(int64_t blamed, uint32_t num_teams) {
  if (blamed == FailureLatch::kNobody) return 0;
  const uint32_t team = TeamOf(blamed);
  const uint64_t rank = static_cast<uint32_t>(blamed);
  if (team >= num_teams) return kImmUnnamed;  // kUnnamed
  const uint64_t payload = 1 + rank * num_teams + team;
  return payload < kImmUnnamed ? static_cast<uint32_t>(payload) : kImmUnnamed;
}
constexpr int64_t BlamedBy(uint32_t payload, uint32_t num_teams) {
  if (payload == 0) return FailureLatch::kNobody;
  if (payload == kImmUnnamed) return FailureLatch::kUnnamed;
  return RankOfTeam((payload - 1) % num_teams, (payload - 1) / num_teams);
}

}  // namespace jax_ep
