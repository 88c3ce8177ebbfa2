// The sum over ranks of their partials of a token, by lanes, along the fixed tree (tree.h).
#pragma once

#include "kernels/gpu/device/elements.cuh"
#include "kernels/gpu/protocol/push.cuh"
#include "kernels/gpu/sums/tree.h"
#include "kernels/layout.h"

namespace jax_ep::gpu {

// f32 partials of a word of 16-bit elements.
struct alignas(16) TwoWords {
  uint4 words[2];
};

// What rows and partials are made of. kLevelsOfTree: of a tree of at most that power of two leaves.
// Kernels of kFewLevels find once for each token where partials are (token_sums.cuh). With
// kFastLevels the tree may have kMostLevels, and the sums that wait at levels from kFastLevels on
// are in local memory. Sums of a node are made, and rounded, below those.
inline constexpr uint32_t kFewLevels = 3;
inline constexpr uint32_t kFastLevels = 7;
inline constexpr uint32_t kMostLevels = 11;
static_assert(kMaxNodeRanks < 1u << kFastLevels);
static_assert(2 * kMaxRanks <= 1u << kMostLevels, "nodes are filled up to powers of two");
template <typename E, typename P, bool kIsVectorised, uint32_t kLevelsOfTree>
struct SumTypes {
  using Elem = E;
  using Partial = P;
  using Word = typename WordOf<E, kIsVectorised>::Type;
  using Storage = typename P::Storage;
  static constexpr uint32_t kElems = WordOf<E, kIsVectorised>::kElems;
  // The partial of a word.
  using PartialWord = std::conditional_t<sizeof(Storage) * kElems == sizeof(Word), Word,
                                         std::conditional_t<kElems == 1, Storage, TwoWords>>;
  static constexpr uint32_t kLevels = kLevelsOfTree;
};

// Ranks as leaves of the tree: those of a node below its level, nodes above it. A node's leaves are
// filled up to a power of two, and what is missing is absent.
struct RankLeaves {
  static constexpr uint32_t kNone = ~0u;
  uint32_t node_size;
  uint32_t node_level = kNone;  // no level of the tree of one node
  uint32_t count;

  // Of one node.
  __host__ __device__ explicit RankLeaves(uint32_t num_ranks)
      : node_size(num_ranks), count(num_ranks) {}
  __host__ __device__ explicit RankLeaves(const GroupShape& shape) : RankLeaves(shape.node_size) {
    if (shape.num_nodes() == 1) return;
    node_level = 0;
    while ((1u << node_level) < node_size) ++node_level;
    count = shape.num_nodes() << node_level;
  }
  // kNone: no rank's leaf.
  __device__ uint32_t RankOf(uint32_t leaf) const {
    const uint32_t local = node_level == kNone ? leaf : leaf & ((1u << node_level) - 1);
    if (leaf >= count || local >= node_size) return kNone;
    return node_level == kNone ? leaf : (leaf >> node_level) * node_size + local;
  }
  __device__ uint32_t LeafOf(uint32_t rank) const {
    return node_level == kNone ? rank : (rank / node_size << node_level) + rank % node_size;
  }
};

// Leaves whose partials are on their way together.
inline constexpr uint32_t kLevelsAtOnce = 2;
inline constexpr uint32_t kLeavesAtOnce = 1u << kLevelsAtOnce;
template <typename T, uint32_t kWords>
using LeafWords = typename T::PartialWord[kLeavesAtOnce][kWords];

// Words first + j * kWarpSize < end of a partial. Where there is none, -0: that added leaves every
// number as it is.
template <typename T, uint32_t kWords>
__device__ inline void LoadPartial(const std::byte* partial, bool is_here, uint32_t first,
                                   uint32_t end, typename T::PartialWord (&words)[kWords]) {
  constexpr auto kMinusZero =
      static_cast<typename T::Storage>(sizeof(typename T::Storage) == 4 ? -0.0f : 0x8000);
  typename T::Storage zeros[T::kElems];
#pragma unroll
  for (auto& zero : zeros) zero = kMinusZero;
#pragma unroll
  for (uint32_t j = 0; j < kWords; ++j) {
    __builtin_memcpy(&words[j], zeros, sizeof(zeros));
    const uint32_t at = first + j * kWarpSize;
    if (is_here && at < end) {
      words[j] = reinterpret_cast<const typename T::PartialWord*>(partial)[at];
    }
  }
}

// The sum of all leaves. load(leaf, words): of kLeavesAtOnce leaves from there on. A node's sum is
// rounded, as if it had travelled.
template <typename T, bool kIsUnrolled, uint32_t kWords, typename Load>
__device__ inline void SumLeaves(const RankLeaves& leaves, float (&sums)[kWords][T::kElems],
                                 Load&& load) {
  float waiting[T::kLevels][kWords][T::kElems];
  constexpr bool kHasMoreLevels = T::kLevels == kFastLevels;
  float waiting_above[kHasMoreLevels ? kMostLevels - kFastLevels : 1][kWords][T::kElems];
  constexpr uint32_t kMostGroups = 1u
                                   << ((kHasMoreLevels ? kMostLevels : T::kLevels) - kLevelsAtOnce);
  constexpr uint32_t kUnroll = kIsUnrolled ? kMostGroups : 1;
  // Of few leaves, to add the -0 of those that are missing would take longer than the loads.
  constexpr bool kEndsAtLeaf = !kIsUnrolled && T::kLevels <= kFewLevels;
  const uint32_t num_groups = (leaves.count + kLeavesAtOnce - 1) / kLeavesAtOnce;
#pragma unroll kUnroll
  for (uint32_t group = 0; group < kMostGroups; ++group) {
    const bool is_last_group = group + 1 == kMostGroups || group + 1 >= num_groups;
    LeafWords<T, kWords> words;
    load(group * kLeavesAtOnce, words);
#pragma unroll
    for (uint32_t j = 0; j < kWords; ++j) {
      float (&sum)[T::kElems] = sums[j];
#pragma unroll
      for (uint32_t i = 0; i < kLeavesAtOnce; ++i) {
        const uint32_t leaf = group * kLeavesAtOnce + i;
        const bool is_last =
            kEndsAtLeaf ? leaf + 1 >= leaves.count : is_last_group && i + 1 == kLeavesAtOnce;
        Unpack<typename T::Partial>(words[i][j], sum);
        const auto visit = [&](uint32_t level, bool is_right) {
          // What was loaded needs no rounding.
          if (level > 0 && level == leaves.node_level) RoundElems<typename T::Partial>(sum);
#pragma unroll
          for (uint32_t e = 0; e < T::kElems; ++e) {
            float& other = waiting[level][j][e];
            is_right ? sum[e] = Add(other, sum[e]) : other = sum[e];
          }
        };
        if constexpr (kHasMoreLevels) {
          AddToLargeTree<T::kLevels, kMostLevels>(
              leaf, is_last, leaves.count, visit, [&](uint32_t level, bool is_right) {
#pragma unroll
                for (uint32_t e = 0; e < T::kElems; ++e) {
                  float& other = waiting_above[level - kFastLevels][j][e];
                  is_right ? sum[e] = Add(other, sum[e]) : other = sum[e];
                }
              });
        } else {
          AddToTree<T::kLevels>(leaf, is_last, visit);
        }
        if (kEndsAtLeaf && is_last) break;
      }
    }
    if (is_last_group) break;
  }
}

// One warp: words of the sum over ranks to `out`, a row of Out; +0 if no rank has a partial.
// load(leaf, word, words), by all lanes: words word + j * kWarpSize of kLeavesAtOnce leaves from
// there on.
template <typename T, typename Out, uint32_t kWords, bool kIsUnrolled, typename OutWord,
          typename Load>
__device__ inline void WriteSumOfRanks(const RankLeaves& leaves, bool has_any, WordRange range,
                                       OutWord* out, Load&& load) {
  for (uint32_t first = range.begin; first < range.end; first += kWords * kWarpSize) {
    const uint32_t word = first + LaneId();
    float sums[kWords][T::kElems];
    SumLeaves<T, kIsUnrolled>(
        leaves, sums, [&](uint32_t leaf, LeafWords<T, kWords>& words) { load(leaf, word, words); });
#pragma unroll
    for (uint32_t j = 0; j < kWords; ++j) {
      const uint32_t at = word + j * kWarpSize;
      if (at >= range.end) continue;
      const auto sum = Pack<Out, OutWord>(sums[j]);
      out[at] = has_any ? sum : OutWord{};
    }
  }
}

}  // namespace jax_ep::gpu
