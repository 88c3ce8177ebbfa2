// 32 bits that name an operation, or a step (network/steps.cuh), in cells which nobody clears.
// Cells begin as zeroes, so no operation has the tag 0: that of a cell which was never written.
//
// Tags are compared for equality only, and return after 2^31 operations. A cell would be taken for
// the running operation's only if the last operation to write it was the one exactly so long ago:
// one call of more tokens than all in between, 2^31 operations after the last such call.
#pragma once

#include <cstdint>

namespace jax_ep::gpu {

inline constexpr uint32_t kTagBits = 32;

// The highest bit says that the cell was written. One instruction: some kernels make a tag for each
// word that they look at.
__host__ __device__ constexpr uint32_t TagOf(uint64_t sequence) {
  return static_cast<uint32_t>(sequence) | 1u << (kTagBits - 1);
}

}  // namespace jax_ep::gpu
