// In which order the partials of a token are added (combine_rows_in_bulk.cu), so that few sums
// wait.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/gpu/sums/sum_ops.h"

namespace jax_ep::gpu::team {

constexpr uint32_t FirstOf(uint64_t ranks) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__ffsll(static_cast<long long>(ranks))) - 1;
#else
  return static_cast<uint32_t>(std::countr_zero(ranks));
#endif
}

// The fixed tree over the ranks (docs/semantics.md), walked from a leaf upwards: `first`, then at
// each level the ranks of the neighbouring part, ascending. Additions commute, so a part of one
// rank is added to what is there; for a larger part that waits. Of 2^n ranks at most n - 1 sums
// wait.
class TreeOrder {
 public:
  constexpr TreeOrder(uint64_t present, uint32_t first) : present_(present), first_(first) {}

  // How many come before `rank`.
  constexpr uint32_t NumBefore(uint32_t rank) const {
    if (rank == first_) return 0;
    const uint64_t part = PartOf(rank);
    return Count(present_ & OwnPart(LevelOf(rank))) + Count(part & ((uint64_t{1} << rank) - 1));
  }
  constexpr uint32_t OpsOfFirst() const { return OpsAfterPart(0); }
  // Of a rank that is not the first.
  constexpr uint32_t OpsOf(uint32_t rank) const {
    const uint64_t part = PartOf(rank);
    uint32_t waiting = 0;  // bit l: a sum of this part waits whose neighbour joins at level l
    uint32_t ops = 0;
    const bool is_many = Count(part) > 1;
    bool begins = is_many;
    for (uint64_t left = part; true;) {
      const uint32_t at = FirstOf(left);
      left &= left - 1;
      ops = begins ? uint32_t{kBeginsSum} : 0u;
      if (left == 0) {
        const uint32_t merges = Count(waiting) + (is_many ? 1u : 0u);
        ops |= OpsOfMerges(merges) | OpsAfterPart(LevelOf(rank) + 1);
      } else {
        // The next one is added to what is there if it is the neighbour of that.
        const uint32_t level = JoinLevel(at, FirstOf(left));
        const uint32_t lower = (1u << level) - 1;
        ops |= OpsOfMerges(Count(waiting & lower));
        waiting &= ~lower;
        const uint64_t after = left & (left - 1);
        begins = after != 0 && JoinLevel(FirstOf(left), FirstOf(after)) < level;
        if (begins) {
          ops |= kPushes | kEndsSum;
          waiting |= 1u << level;
        }
      }
      if (at == rank) return ops;
    }
  }

 private:
  template <typename Bits>
  static constexpr uint32_t Count(Bits bits) {
#if defined(__CUDA_ARCH__)
    return static_cast<uint32_t>(sizeof(bits) == sizeof(uint64_t) ? __popcll(bits) : __popc(bits));
#else
    return static_cast<uint32_t>(std::popcount(bits));
#endif
  }
  // Level at which two ranks are in neighbouring parts of 2^level.
  static constexpr uint32_t JoinLevel(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    return 31 - static_cast<uint32_t>(__clz(static_cast<int>(a ^ b)));
#else
    return static_cast<uint32_t>(std::bit_width(a ^ b)) - 1;
#endif
  }
  constexpr uint32_t LevelOf(uint32_t rank) const { return JoinLevel(rank, first_); }
  static constexpr uint64_t Aligned(uint32_t rank, uint32_t level) {
    const uint32_t size = 1u << level;
    const uint64_t ones = size == 64 ? ~uint64_t{0} : (uint64_t{1} << size) - 1;
    return ones << (rank & ~(size - 1));
  }
  constexpr uint64_t OwnPart(uint32_t level) const { return Aligned(first_, level); }
  // The neighbouring part that a rank is in.
  constexpr uint64_t PartOf(uint32_t rank) const { return present_ & Aligned(rank, LevelOf(rank)); }
  static constexpr uint32_t OpsOfMerges(uint32_t merges) {
    return merges > 0 ? kEndsSum | merges << kMergesShift : 0u;
  }
  // Once all parts below `level` have been added.
  constexpr uint32_t OpsAfterPart(uint32_t level) const {
    const uint64_t above = level > 5 ? 0 : present_ & ~OwnPart(level);
    if (above == 0) return kIsResult | kEndsSum;
    for (uint32_t next = level;; ++next) {
      const uint64_t part = present_ & Aligned(first_ ^ 1u << next, next);
      if (part != 0) return Count(part) > 1 ? kPushes | kEndsSum : 0u;
    }
  }

  uint64_t present_;
  uint32_t first_;
};

}  // namespace jax_ep::gpu::team
