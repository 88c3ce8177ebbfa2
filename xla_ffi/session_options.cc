#include "xla_ffi/session_options.h"

#include <algorithm>
#include <cstdio>

#include "proxy/abi/command.h"

namespace jax_ep {
namespace {

std::string Gibibytes(uint64_t num_bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f GiB",
                static_cast<double>(num_bytes) / static_cast<double>(uint64_t{1} << 30));
  return text;
}

}  // namespace

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

Status CheckReach(const SessionOptions& options, uint64_t buffer_bytes) {
  if (options.shape.num_nodes() == 1 || buffer_bytes <= kMaxHeapBytes) return Status::Ok();
  return InvalidArgument(
      "group " + options.name + ": got sizes that need " + Gibibytes(buffer_bytes) +
      " of exchange buffers per rank, expected at most " + Gibibytes(kMaxHeapBytes) +
      " in a group of several nodes, the most that a command between nodes can address; "
      "lower max_tokens, hidden or max_in_flight, or have more ranks per node");
}

bool IsOneProcess(const SessionOptions& options) {
  for (const auto& team : options.team_processes) {
    for (const uint32_t process : team) {
      if (process != options.process_index) return false;
    }
  }
  return true;
}

ProxyOptions ProxyOptionsFor(const SessionOptions& options, const Env& env) {
  return {.group_name = options.name,
          .transport = options.transport,
          .faulty_spec = env.faulty_spec,
          .window_messages = env.window_messages,
          .window_bytes = env.window_bytes,
          .inbox_slots = env.inbox_slots,
          .peer_timeout = options.peer_timeout,
          .timeout = options.timeout,
          .caller_progress = env.caller_progress != 0};
}

RankPlace PlaceOf(const SessionOptions& options, const LocalRank& local) {
  const std::vector<std::pair<uint32_t, uint32_t>>& all = options.host_ranks;
  const auto at = std::find(all.begin(), all.end(), std::pair(local.team, local.rank));
  if (at == all.end()) return RankPlace{};
  return {.local_index = static_cast<uint32_t>(at - all.begin()),
          .num_local = static_cast<uint32_t>(all.size())};
}

}  // namespace jax_ep
