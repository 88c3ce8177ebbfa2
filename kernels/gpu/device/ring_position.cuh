// Where a warp is in a ring of shared memory whose slots have mbarriers.
#pragma once

#include <cstdint>

#include "kernels/gpu/device/warp.cuh"

namespace jax_ep::gpu {

// Behind a SyncWarp: one lane arrives for its warp. racecheck does not follow that; in the build
// for it (tests/kernels_gpu/sanitize.sh) every lane arrives.
#if defined(JAX_EP_RACECHECK)
inline constexpr uint32_t kWarpArrivals = kWarpSize;
#else
inline constexpr uint32_t kWarpArrivals = 1;
#endif
__device__ inline bool ArrivesForWarp() { return kWarpArrivals > 1 || LaneId() == 0; }

// A slot, with the parity of its barriers. Who fills a ring and waits for free slots begins with
// parity 1: what it waits for first is what has never been used.
struct RingPosition {
  uint32_t slot = 0;
  uint32_t parity = 0;

  __device__ void Advance(uint32_t num_slots) {
    if (++slot != num_slots) return;
    slot = 0;
    parity ^= 1;
  }
};

}  // namespace jax_ep::gpu
