#include "xla_ffi/session_options.h"

#include <algorithm>

namespace jax_ep {

Status CheckOptions(const SessionOptions& options) {
  const GroupShape& shape = options.shape;
  if (shape.num_ranks == 0 || shape.node_size == 0 || shape.num_ranks % shape.node_size != 0) {
    return InvalidArgument("group " + options.name + ": node_size " +
                           std::to_string(shape.node_size) + " does not divide the " +
                           std::to_string(shape.num_ranks) + " ranks of the group");
  }
  for (const LocalRank& local : options.local_ranks) {
    if (local.team >= options.team_processes.size() ||
        local.rank >= options.team_processes[local.team].size() ||
        options.team_processes[local.team].size() != shape.num_ranks) {
      return InvalidArgument("group " + options.name + ": rank table and shape disagree");
    }
  }
  return Status::Ok();
}

bool IsOneProcess(const SessionOptions& options) {
  for (const auto& team : options.team_processes) {
    for (const uint32_t process : team) {
      if (process != options.process_index) return false;
    }
  }
  return true;
}

RankPlace PlaceOf(const SessionOptions& options, const LocalRank& local) {
  const std::vector<std::pair<uint32_t, uint32_t>>& all = options.host_ranks;
  const auto at = std::find(all.begin(), all.end(), std::pair(local.team, local.rank));
  if (at == all.end()) return RankPlace{};
  return {.local_index = static_cast<uint32_t>(at - all.begin()),
          .num_local = static_cast<uint32_t>(all.size())};
}

}  // namespace jax_ep
