// Rounds: how a call is cut where a heap has no room for all of it. Pure arithmetic.
#pragma once

#include <cstdint>

namespace jax_ep {

// Memory is bounded in the number of ranks. A call whose rows would not fit is made in rounds, each
// of the next tokens of every rank: so many that the blocks [peer] of an area hold together the
// rows of this many whole calls.
//   ht combine, [N] blocks: a rank has at most K partials of a token, so up to 8 ranks nothing is
//   lost. ht between nodes, [M] blocks of rows for dispatch. ll, [N] blocks, in rows: 64 ranks of
//   128 tokens.
inline constexpr uint64_t kCombineBlocks = 8;
inline constexpr uint64_t kDispatchBlocks = 4;
inline constexpr uint64_t kLlRows = 8192;

// How a kind of call is cut: round r has tokens [r * tokens, (r + 1) * tokens) of every rank.
struct Rounds {
  uint64_t tokens = 0;    // of one round
  bool is_split = false;  // the largest call takes several rounds: then every call of the kind runs
                          // whole, in set 0, and its rounds are numbered on for ever

  // For blocks that have room for `num_rows` together. `limit`: GroupShape::round_tokens.
  static constexpr Rounds Make(uint64_t max_tokens, uint64_t num_rows, uint64_t num_blocks,
                               uint64_t limit) {
    uint64_t tokens = num_rows / num_blocks;
    if (limit != 0 && limit < tokens) tokens = limit;
    if (tokens == 0) tokens = 1;
    return tokens < max_tokens ? Rounds{tokens, true} : Rounds{max_tokens, false};
  }
  // Sets of an area that only the rounds of calls use.
  constexpr uint64_t num_sets(uint64_t depth) const { return is_split ? 1 : depth; }
};

}  // namespace jax_ep
