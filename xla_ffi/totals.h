// What a session has counted, for Python, and as JSON for whoever asks from another process
// (`python -m jax_ep report`).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "proxy/stats.h"
#include "xla_ffi/session_options.h"

namespace jax_ep {

// Of one local rank, as RankCounters (kernels/launch.h) has them.
struct RankTotals {
  LocalRank id;
  uint64_t plans = 0, dispatches = 0, combines = 0;
  uint64_t rows_received = 0, rows_dropped = 0, invalid_ids = 0;
  uint64_t last_overflow = 0, bytes_pulled = 0;
  uint64_t wait_ns = 0;  // GPUs wait for all others at once: in each phase the longest
  std::vector<uint64_t> pairs_per_expert = {};  // [E_l]
  std::vector<uint64_t> wait_by_peer = {};      // [kNumWaitPhases * N]
  // CPUs only.
  std::optional<uint64_t> rows_sent_internode = {}, bytes_sent_internode = {};
  // GPUs only. Launches are calls whose handler ran: fewer than were executed where graphs replay
  // them.
  std::optional<uint64_t> bytes_staged = {}, launches = {};
};

struct SessionTotals {
  std::string name;
  uint32_t num_ranks = 0;
  std::string failure;  // "": none
  std::vector<RankTotals> ranks;
  std::vector<FlowStats> flows;
};

// {"name", "num_ranks", "failure", "ranks": [{...}], "flows": [{...}]}
std::string ToJson(const SessionTotals& totals);

}  // namespace jax_ep
