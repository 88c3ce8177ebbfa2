// kernels/gpu/sums: the fixed order of additions (docs/semantics.md), for all combines.
//   In: the rows that a rank holds of a token, the partials of other ranks. Out: one sum, in f32.
//   Waits: nothing. The caller has waited for what it passes.
//
// The tree over ranks, also for the host. All walks visit leaves in ascending order, and have one
// rule: after a leaf, the sum so far is added to what waits to its left, up to the level at which
// the next leaf joins; there it waits itself. After the last leaf all that waits is added.
// AddToTree is this rule for all leaves of a tree, TreeOrder for a set of leaves.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/gpu/sums/sum_ops.h"

namespace jax_ep::gpu {

// Level at which two leaves are in neighbouring parts of 2^level.
constexpr uint32_t JoinLevel(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return 31 - static_cast<uint32_t>(__clz(static_cast<int>(a ^ b)));
#else
  return static_cast<uint32_t>(std::bit_width(a ^ b)) - 1;
#endif
}

// After `leaf` of the leaves 0, 1, ... of a tree of at most 2^kLevels. visit(level, is_right), from
// level 0 on: a right part is added to what waits at that level; a left part waits there itself.
// What the last leaf's part would wait for does not come, so it goes on. True: past the last level.
template <uint32_t kLevels, typename Visit>
constexpr bool AddToTree(uint32_t leaf, bool is_last, Visit&& visit) {
#if defined(__CUDA_ARCH__) || defined(__HIPCC__)  // host compilers do not know it
#pragma unroll
#endif
  for (uint32_t level = 0; level < kLevels; ++level) {
    const bool is_right = (leaf >> level & 1) != 0;
    visit(level, is_right);
    if (!is_right && !is_last) return false;
  }
  return true;
}

// The same for trees of up to 2^kMost leaves, of which `num_leaves` are there: visit_above is
// called for levels from kLevels on.
template <uint32_t kLevels, uint32_t kMost, typename Visit, typename VisitAbove>
constexpr void AddToLargeTree(uint32_t leaf, bool is_last, uint32_t num_leaves, Visit&& visit,
                              VisitAbove&& visit_above) {
  if (!AddToTree<kLevels>(leaf, is_last, visit) || num_leaves <= 1u << kLevels) return;
#if defined(__CUDA_ARCH__) || defined(__HIPCC__)
#pragma unroll 1
#endif
  for (uint32_t level = kLevels; level < kMost; ++level) {
    const bool is_right = (leaf >> level & 1) != 0;
    visit_above(level, is_right);
    if (!is_right && !is_last) return;
  }
}

namespace team {

// The order of a set of leaves, and what a reducer does after each (sum_ops.h). A part of one leaf
// is added to what is there, larger ones wait. If leaf 0 is a rank's own, only others are added to
// what is there, and of 2^n leaves at most n - 1 sums wait. So a rank has leaf rank ^ own:
// additions commute, so this is the same tree.
class TreeOrder {
 public:
  explicit constexpr TreeOrder(uint64_t leaves) : leaves_(leaves) {}

  constexpr uint32_t NumBefore(uint32_t leaf) const {
#if defined(__CUDA_ARCH__)
    return static_cast<uint32_t>(__popcll(leaves_ & Below(leaf)));
#else
    return static_cast<uint32_t>(std::popcount(leaves_ & Below(leaf)));
#endif
  }
  // Begins a sum; others are added to what is there.
  constexpr bool Begins(uint32_t leaf) const {
    const uint64_t before = leaves_ & Below(leaf);
    return before == 0 || LevelOfNext(leaf) < JoinLevel(LastOf(before), leaf);
  }
  constexpr uint32_t OpsAfter(uint32_t leaf) const {
    const uint32_t level_of_next = LevelOfNext(leaf);
    uint32_t num_parts = 0;  // to the left of the leaf's part that are added
    for (uint64_t left = leaves_ & Below(leaf); left != 0; ++num_parts) {
      const uint32_t level = JoinLevel(LastOf(left), leaf);
      if (level > level_of_next) break;
      left &= Below(leaf & ~((2u << level) - 1));
    }
    // To the first of them the leaf has been added.
    uint32_t ops = num_parts > 1 ? kEndsSum | (num_parts - 1) << kMergesShift : 0u;
    const uint64_t after = After(leaf);
    if (after == 0) {
      ops |= kIsResult | kEndsSum;
    } else if (Begins(FirstOf(after))) {
      ops |= kPushes | kEndsSum;
    }
    return ops;
  }

 private:
  static constexpr uint32_t FirstOf(uint64_t leaves) {
#if defined(__CUDA_ARCH__)
    return static_cast<uint32_t>(__ffsll(static_cast<long long>(leaves))) - 1;
#else
    return static_cast<uint32_t>(std::countr_zero(leaves));
#endif
  }
  static constexpr uint32_t LastOf(uint64_t leaves) {
#if defined(__CUDA_ARCH__)
    return 63 - static_cast<uint32_t>(__clzll(static_cast<long long>(leaves)));
#else
    return 63 - static_cast<uint32_t>(std::countl_zero(leaves));
#endif
  }
  static constexpr uint64_t Below(uint32_t leaf) { return (uint64_t{1} << leaf) - 1; }
  constexpr uint64_t After(uint32_t leaf) const { return leaves_ & ~(Below(leaf) << 1 | 1); }
  constexpr uint32_t LevelOfNext(uint32_t leaf) const {
    const uint64_t after = After(leaf);
    return after == 0 ? 64 : JoinLevel(leaf, FirstOf(after));
  }

  uint64_t leaves_;
};

}  // namespace team
}  // namespace jax_ep::gpu
