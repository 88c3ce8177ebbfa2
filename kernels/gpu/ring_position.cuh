// Where a warp is in a ring of shared memory whose slots have mbarriers.
#pragma once

#include <cstdint>

namespace jax_ep::gpu {

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
