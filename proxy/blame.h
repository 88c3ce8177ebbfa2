// Blame: whom a rank blames for a failure, as ImmControl::kFailed says it in 13 bits to the ranks
// of its team. They name the same rank, of whatever team of the group it is: who is in both teams
// may hear of it by this message first.
#pragma once

#include <cstdint>
#include <string_view>

#include "proxy/abi/imm.h"
#include "proxy/base/failure.h"

namespace jax_ep {

// What a rank is told, behind the name of the one that it hears it from.
inline constexpr std::string_view kAgreesAnew =
    " says that the processes of the group agree anew on who takes part; call group.agree in this "
    "process, too";

// blamed: RankOfTeam, FailureLatch::kNobody, kUnnamed or kAgreement. Groups of 8,189 ranks in all
// their teams have room for each of them.
constexpr uint32_t BlamePayload(int64_t blamed, uint32_t num_teams) {
  if (blamed == FailureLatch::kNobody) return 0;
  if (blamed == FailureLatch::kAgreement) return kImmAgreement;
  const uint32_t team = TeamOf(blamed);
  const uint64_t rank = static_cast<uint32_t>(blamed);
  if (team >= num_teams) return kImmUnnamed;  // kUnnamed
  const uint64_t payload = 1 + rank * num_teams + team;
  return payload < kImmAgreement ? static_cast<uint32_t>(payload) : kImmUnnamed;
}
constexpr int64_t BlamedBy(uint32_t payload, uint32_t num_teams) {
  if (payload == 0) return FailureLatch::kNobody;
  if (payload == kImmUnnamed) return FailureLatch::kUnnamed;
  if (payload == kImmAgreement) return FailureLatch::kAgreement;
  return RankOfTeam((payload - 1) % num_teams, (payload - 1) / num_teams);
}

}  // namespace jax_ep
