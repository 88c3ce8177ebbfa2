// The sum over ranks of their partials, along the fixed tree, fed rank by rank: what the kernels
// share that combine without bulk copies. tree_order.h has the order for those with them.
#pragma once

#include "kernels/gpu/device/elements.cuh"
#include "kernels/layout.h"

namespace jax_ep::gpu {

template <uint32_t kWords, uint32_t kElems>
__device__ inline void CopySums(float (&to)[kWords][kElems], const float (&from)[kWords][kElems]) {
#pragma unroll
  for (uint32_t i = 0; i < kWords; ++i) {
#pragma unroll
    for (uint32_t e = 0; e < kElems; ++e) to[i][e] = from[i][e];
  }
}

// Rounds where a partial would leave its rank, so that bits do not depend on who owns the token.
template <typename Partial, uint32_t kWords, uint32_t kElems>
__device__ inline void RoundSums(float (&sums)[kWords][kElems]) {
#pragma unroll
  for (uint32_t i = 0; i < kWords; ++i) RoundElems<Partial>(sums[i]);
}

// right = left + right
template <uint32_t kWords, uint32_t kElems>
__device__ inline void AddSums(const float (&left)[kWords][kElems],
                               float (&right)[kWords][kElems]) {
#pragma unroll
  for (uint32_t i = 0; i < kWords; ++i) {
#pragma unroll
    for (uint32_t e = 0; e < kElems; ++e) right[i][e] = Add(left[i][e], right[i][e]);
  }
}

// Ranks as leaves of the fixed tree (docs/semantics.md): those of a node below its level, nodes
// above it. A node's leaves are filled up to a power of two, and what is missing is absent.
struct RankLeaves {
  static constexpr uint32_t kNone = ~0u;
  uint32_t node_size;
  uint32_t node_level;  // no level of the tree in a group of one node
  uint32_t count;

  __host__ __device__ explicit RankLeaves(const GroupShape& shape)
      : node_size(shape.node_size), node_level(0), count(shape.num_ranks) {
    while ((1u << node_level) < node_size) ++node_level;
    if (shape.num_nodes() > 1) {
      count = shape.num_nodes() << node_level;
    } else {
      node_level = kNone;
    }
  }
  __device__ uint32_t RankOf(uint32_t leaf) const {
    if (node_level == kNone) return leaf;
    const uint32_t local = leaf & ((1u << node_level) - 1);
    return local < node_size ? (leaf >> node_level) * node_size + local : kNone;
  }
};

// The tree, fed in the order of leaves; there are less than 2^kLevels. `waiting`: sums of complete
// subtrees of 2^level leaves that wait for their right neighbour; absent ones leave the other
// unchanged. `is_present`: which of them there are, by level. Adds what `leaf` has, if anything;
// `has_sums` and `sums` are scratch. A node's sum is rounded, as if it had travelled.
template <typename Partial, uint32_t kLevels, uint32_t kWords, uint32_t kElems>
__device__ inline uint32_t AddToTree(uint32_t leaf, uint32_t node_level,
                                     float (&waiting)[kLevels][kWords][kElems], uint32_t is_present,
                                     bool& has_sums, float (&sums)[kWords][kElems]) {
  bool is_left = false;
#pragma unroll
  for (uint32_t level = 0; level < kLevels; ++level) {
    if (is_left) continue;
    if (level == node_level) RoundSums<Partial>(sums);
    is_left = (leaf >> level & 1) == 0;
    const bool has_waiting = (is_present >> level & 1) != 0;
    if (is_left) {
      is_present = (is_present & ~(1u << level)) | (has_sums ? 1u << level : 0);
      if (has_sums) CopySums(waiting[level], sums);
    } else if (has_waiting) {
      has_sums ? AddSums(waiting[level], sums) : CopySums(sums, waiting[level]);
      has_sums = true;
    }
  }
  return is_present;
}

// The sum of all leaves of a tree. False: none had anything.
template <uint32_t kLevels, uint32_t kWords, uint32_t kElems>
__device__ inline bool SumOfTree(uint32_t num_leaves,
                                 const float (&waiting)[kLevels][kWords][kElems],
                                 uint32_t is_present, float (&sums)[kWords][kElems]) {
  // What waits has no right neighbour any more, or is its lower levels' left one.
  bool has_sums = false;
#pragma unroll
  for (uint32_t level = 0; level < kLevels; ++level) {
    // A level whose bit of num_leaves is 0 has been merged upwards: its content is old.
    if ((num_leaves >> level & 1) == 0 || (is_present >> level & 1) == 0) continue;
    has_sums ? AddSums(waiting[level], sums) : CopySums(sums, waiting[level]);
    has_sums = true;
  }
  return has_sums;
}

}  // namespace jax_ep::gpu
