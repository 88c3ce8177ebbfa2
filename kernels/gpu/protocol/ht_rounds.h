// Rounds of HT calls between nodes: how many tokens of every rank cross together, so that a heap is
// bounded in the number of ranks, and a stage in that of nodes. Pure arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/layout.h"

namespace jax_ep::gpu {

// Tokens that are sent together, by as few commands as their rows allow. A multiple of 8, so that
// rows of any size and scalars of any K begin a chunk at a multiple of kWireUnitBytes; at most as
// many as a u32 has bits.
inline constexpr uint64_t kNetChunkTokens = 32;

// All blocks [rank] of a reduce area have the partials, and all blocks [node] of a stage area the
// rows, of so many whole calls: 16 ranks in at most 4 nodes lose nothing.
inline constexpr uint64_t kReduceBlocks = 16;
inline constexpr uint64_t kStageBlocks = 4;

// Where a call has several rounds: so many are sent before the first of them is awaited.
inline constexpr uint32_t kRoundsAhead = 2;

struct HtRounds {
  uint64_t tokens = 0;       // of a rank's round: max_tokens, or a multiple of kNetChunkTokens
  bool are_several = false;  // the largest call has more than one

  // Sets of places that rounds take in turn, in reduce areas and in stages (network/dispatch.cu):
  // tests/kernels_gpu/round_reuse_test.cc.
  constexpr uint32_t num_reduce_sets() const { return are_several ? kRoundsAhead : 1; }
  constexpr uint32_t num_stage_sets() const { return 2 * num_reduce_sets(); }
};

// Calls of one node have one round.
constexpr HtRounds HtRoundsOf(const GroupShape& shape) {
  const uint64_t most = shape.has_ht ? shape.max_tokens : 0;
  const bool is_limited = shape.round_tokens != 0 && shape.round_tokens < most;
  const uint64_t room =
      std::min(kReduceBlocks * most / shape.num_ranks, kStageBlocks * most / shape.num_nodes());
  if (shape.num_nodes() == 1 || (room >= most && !is_limited)) return {.tokens = most};
  uint64_t tokens = room / kRoundsAhead;
  if (is_limited) tokens = std::min(tokens, shape.round_tokens);
  tokens = std::max(tokens / kNetChunkTokens, uint64_t{1}) * kNetChunkTokens;
  if (tokens >= most) return {.tokens = most};
  return {.tokens = tokens, .are_several = true};
}

}  // namespace jax_ep::gpu
