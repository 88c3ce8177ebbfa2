// kernels/gpu/lanes: the same operations without bulk copies (sm_80, AMD, rows of odd size).
//   In and out: as in ht/combine, ll/dispatch and ll/combine.
//   Waits: as there. The flags are the same, so ranks may differ in which of the two they run.
//
// That is why there are two combines here: a rank without bulk copies must write and wait for what
// its peers with them do, which is the reduce area with a flag per chunk of tokens in mode ht, and
// slot sets with a flag per piece of a row in mode ll. Between nodes it is the reduce area, and no
// flags but those of the mates.
//
// What is the same in all of them is in this file, by one warp: this rank's partial of a token
// goes to some place (WritePartial, WriteScalars), and a token of this rank is found, waited for by
// the caller, and summed from partials at some places (OwnToken, WriteToken). Kernels add who takes
// which token, where places are, and flags. Call: the parameters of any combine.
#pragma once

#include "kernels/gpu/device/warp_set.cuh"
#include "kernels/gpu/protocol/tagged_rows.cuh"
#include "kernels/gpu/sums/rank_sums.cuh"
#include "kernels/gpu/sums/token_rows.cuh"

namespace jax_ep::gpu {

// Weighted sum of the local rows, words word + i * kWarpSize < end for i < kWords. The next row is
// on its way while one is added.
template <typename T, uint32_t kWords, typename Call>
__device__ inline void SumTokenRows(const Call& call, const RowList& list, uint32_t count,
                                    uint32_t word, uint32_t end, float (&sums)[kWords][T::kElems]) {
  using Word = typename T::Word;
  Word next[kWords];
  const auto load = [&](uint32_t i) {
    const auto* row = reinterpret_cast<const Word*>(call.y + static_cast<uint64_t>(list.rows[i]) *
                                                                 call.row_bytes);
#pragma unroll
    for (uint32_t j = 0; j < kWords; ++j) {
      if (word + j * kWarpSize < end) next[j] = row[word + j * kWarpSize];
    }
  };
  load(0);
#pragma unroll
  for (uint32_t j = 0; j < kWords; ++j) {
    // A sum begins with its first product: -0 leaves every number as it is.
#pragma unroll
    for (float& sum : sums[j]) sum = -0.0f;
  }
  for (uint32_t i = 0; i < count; ++i) {
    Word words[kWords];
#pragma unroll
    for (uint32_t j = 0; j < kWords; ++j) words[j] = next[j];
    if (i + 1 < count) load(i + 1);
    AddRow<typename T::Elem>(words, list.weights[i], /*is_first=*/false, sums);
  }
}

// Those words of this rank's partial of a token with `count` rows here. store(at, word), by a lane.
template <typename T, typename Call, typename Store>
__device__ void MakePartial(const Call& call, const RowList& list, uint32_t count, WordRange range,
                            Store&& store) {
  constexpr uint32_t kWords = 4;  // in flight per lane
  for (uint32_t first = range.begin; first < range.end; first += kWords * kWarpSize) {
    const uint32_t word = first + LaneId();
    float sums[kWords][T::kElems];
    SumTokenRows<T>(call, list, count, word, range.end, sums);
#pragma unroll
    for (uint32_t j = 0; j < kWords; ++j) {
      const uint32_t at = word + j * kWarpSize;
      if (at < range.end) store(at, Pack<typename T::Partial, typename T::PartialWord>(sums[j]));
    }
  }
}
template <typename T, typename Call>
__device__ void WritePartial(const Call& call, const RowList& list, uint32_t count, WordRange range,
                             std::byte* partial) {
  using PartialWord = typename T::PartialWord;
  auto* to = reinterpret_cast<PartialWord*>(partial);
  MakePartial<T>(call, list, count, range,
                 [&](uint32_t at, const PartialWord& word) { to[at] = word; });
}

// The scalars [K] of a token with rows here.
template <typename Call>
__device__ void WriteScalars(const Call& call, const TokenRows<>& rows, float* scalars) {
#pragma unroll
  for (uint32_t i = 0; i < kEntriesPerLane; ++i) {
    const uint32_t k = rows.PairOf(i);
    const float scalar = rows.PairScalar(call, i);
    if (k < call.device.shape.top_k) scalars[k] = scalar;
  }
}

static_assert(kMaxRanks <= WarpSet::kMost);

// A token of this rank whose partials are added.
struct OwnToken {
  static constexpr uint32_t kNobody = ~0u;
  uint64_t token;
  uint32_t own;      // the rank whose partial is summed with the token: this one, or kNobody
  TokenRows<> rows;  // of that
  uint32_t holder[kEntriesPerLane];  // of the lane's pairs, or kNobody
  WarpSet partials;                  // ranks of which there is one, own included

  // rank_at(holder): whose partial has the holder's rows.
  template <typename Call, typename RankAt>
  __device__ OwnToken(const Call& call, uint64_t number, uint32_t own_rank,
                      const TokenRows<>& own_rows, RankAt&& rank_at)
      : token(number), own(own_rank), rows(own_rows) {
    const GroupShape& shape = call.device.shape;
    if (rows.count > 0) partials.AddOne(own);
#pragma unroll
    for (uint32_t i = 0; i < kEntriesPerLane; ++i) {
      const uint32_t k = rows.PairOf(i);
      const int32_t slot = k < shape.top_k ? call.send_slot[token * shape.top_k + k] : -1;
      const uint32_t rank = slot >= 0 ? static_cast<uint32_t>(slot) / call.rank_rows : kNobody;
      // Plans come from the caller: a slot beyond the last rank is none.
      holder[i] = rank < shape.num_ranks ? rank : kNobody;
      partials.Add(holder[i] != kNobody && rank != own, rank_at(rank));
    }
  }
};

// The scalars of such a token. scalars_of(holder): [K], what another rank has sent.
template <typename Call, typename ScalarsOf>
__device__ void WriteOwnScalars(const Call& call, const OwnToken& token, ScalarsOf&& scalars_of) {
  const uint32_t top_k = call.device.shape.top_k;
#pragma unroll
  for (uint32_t i = 0; i < kEntriesPerLane; ++i) {
    const uint32_t k = token.rows.PairOf(i);
    const uint32_t holder = token.holder[i];
    float scalar = 0.0f;
    if (token.rows.count > 0) {
      const float own = token.rows.PairScalar(call, i);
      if (holder == token.own) scalar = own;
    }
    if (k >= top_k) continue;
    if (holder != token.own && holder != OwnToken::kNobody) scalar = scalars_of(holder)[k];
    call.pair_scalars_out[token.token * top_k + k] = scalar;
  }
}

// One warp: where partials of other ranks are, into the list. In the loop over words that would
// take longer than the sums.
template <typename PartialOf>
__device__ void ListPartials(const RankLeaves& leaves, const OwnToken& token, RowList& list,
                             PartialOf&& partial_of) {
  const uint32_t leaf = LaneId() % RowList::kMostPartials;
  const uint32_t rank = leaves.RankOf(leaf);
  const bool is_there = token.partials.Has(rank == RankLeaves::kNone ? 0 : rank);
  const bool is_other = rank != RankLeaves::kNone && is_there && rank != token.own;
  SyncWarp();  // the token before has been summed
  if (LaneId() < RowList::kMostPartials) {
    list.partials[leaf] = is_other ? partial_of(rank) : nullptr;
  }
  SyncWarp();
}

// Those words of the sum of such a token; partials of other ranks are at partial_of(rank).
template <typename T, typename Call, typename PartialOf>
__device__ void WriteOwnSum(const Call& call, const RankLeaves& leaves, const OwnToken& token,
                            RowList& list, WordRange range, PartialOf&& partial_of) {
  constexpr bool kAreFew = T::kLevels <= kFewLevels;
  static_assert(!kAreFew || 1u << T::kLevels <= RowList::kMostPartials);
  constexpr uint32_t kWords = !kAreFew || sizeof(typename T::Storage) > 2 ? 1 : 2;
  if constexpr (kAreFew) ListPartials(leaves, token, list, partial_of);
  const auto find = [&](uint32_t leaf) -> const std::byte* {
    if constexpr (kAreFew) {
      return list.partials[leaf];
    } else {
      const uint32_t rank = leaves.RankOf(leaf);
      const bool is_there = rank != RankLeaves::kNone && token.partials.Has(rank);
      return is_there && rank != token.own ? partial_of(rank) : nullptr;
    }
  };
  const uint32_t own_leaf = token.rows.count > 0 ? leaves.LeafOf(token.own) : RankLeaves::kNone;
  auto* out = reinterpret_cast<typename T::Word*>(call.out + token.token * call.row_bytes);
  WriteSumOfRanks<T, typename T::Elem, kWords, /*kIsUnrolled=*/false>(
      leaves, !token.partials.IsEmpty(), range, out,
      [&](uint32_t leaf, uint32_t word, LeafWords<T, kWords>& words) {
#pragma unroll
        for (uint32_t i = 0; i < kLeavesAtOnce; ++i) {
          const std::byte* partial = find(leaf + i);
          LoadPartial<T>(partial, partial != nullptr, word, range.end, words[i]);
        }
        if (own_leaf - leaf >= kLeavesAtOnce) return;  // also if it is below
        float sums[kWords][T::kElems];
        SumTokenRows<T>(call, list, token.rows.count, word, range.end, sums);
#pragma unroll
        for (uint32_t i = 0; i < kLeavesAtOnce; ++i) {
          if (leaf + i != own_leaf) continue;
#pragma unroll
          for (uint32_t j = 0; j < kWords; ++j) {
            // As if it had been stored: bits do not depend on who owns the token.
            words[i][j] = Pack<typename T::Partial, typename T::PartialWord>(sums[j]);
          }
        }
      });
}

}  // namespace jax_ep::gpu
