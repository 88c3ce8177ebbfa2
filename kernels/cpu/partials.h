// What HT and LL combine share: the rank partial of a token, and the owner's final sum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cpu/row_index.h"
#include "kernels/cpu/sync.h"
#include "kernels/cpu/tree.h"
#include "kernels/launch.h"

namespace jax_ep {

// How one combine packs a partial and its pair scalars: only what the call carries.
struct PartialPitch {
  uint64_t scalars_offset = 0;
  uint64_t rank_pitch = 0;  // partial, pair scalars [K]
  uint64_t node_pitch = 0;  // partial, pair scalars [node_size][K]

  static PartialPitch Make(const GroupShape& shape, bool has_rows, bool has_pair_scalars);
};

// Checks the spans of a call's sending and receiving side: empty, or what is wrong.
std::string CheckCombineSend(const GroupShape& shape, const CombineParams& params);
std::string CheckCombineReceive(const GroupShape& shape, const CombineParams& params);

// Writes the partial and pair scalars of (source, token) of this rank at `to`: nothing if it has no
// row.
void WriteRankPartial(const GroupShape& shape, uint32_t rank, const CombineParams& params,
                      const PartialPitch& pitch, const RowIndex& index, uint32_t source,
                      int64_t token, TokenSum& sum, std::byte* to);

// The slot of `rank` among the partials of one token, of layout.ll_slots: the rank itself where
// there are so few, else the lowest k of the token's pairs on that rank, which no other rank has.
// The holder of the rows knows it from recv_src, the token's owner from send_slot.
inline uint32_t LlSlot(const GroupShape& shape, uint32_t num_slots, uint32_t rank,
                       uint32_t lowest_k) {
  return num_slots == shape.num_ranks ? rank : lowest_k;
}

// Where a rank's contribution to this rank's tokens is.
struct Contribution {
  Term::Kind kind = Term::Kind::kRankPartial;
  // kRow: that rank's y, row_weights and pair scalars arrays. Else: rows of `pitch` bytes, by
  // i = token - first_token; by map[i], if `map` is set; by [i][LlSlot], if `num_slots` is.
  const std::byte* rows = nullptr;
  const float* row_weights = nullptr;  // null: 1
  const float* pair_scalars = nullptr;
  uint64_t pitch = 0;
  uint64_t first_token = 0;
  const int32_t* map = nullptr;
  uint32_t num_slots = 0;
  uint64_t scalars_offset = 0;  // from the start of a packed row to the pair scalars of this rank
};

// Sums tokens [first, last) of this rank and fetches their pair scalars: params.out and
// params.pair_scalars_out, each element once. `contributions` is indexed by rank; params.send_slot
// has been checked.
void SumTokens(Rank& rank, const CombineParams& params, int64_t first, int64_t last,
               uint64_t rows_per_rank, const std::vector<Contribution>& contributions);

// Adds a finished combine to the rank's counters.
void CountCombine(Rank& rank);

}  // namespace jax_ep
