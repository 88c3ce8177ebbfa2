// How many of first, first + step, first + 2 step, ... are below an end: what one of `step` blocks,
// warps or threads has of the work that they divide among them.
#pragma once

#include <cstdint>

#include "kernels/gpu/device/vendor.h"

namespace jax_ep::gpu {

__host__ __device__ constexpr uint32_t CountStrided(uint32_t first, uint32_t step, uint32_t end) {
  return end > first ? (end - first - 1) / step + 1 : 0;
}

}  // namespace jax_ep::gpu
