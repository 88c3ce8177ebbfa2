// How the warps of a block that send round after round share releases. A release takes microseconds
// while the wire is busy, so all that was sent in a round has one, and publishers make it, which
// take turns: nobody who sends waits for it.
#pragma once

#include <cstdint>

#include "kernels/gpu/device/memory_order.cuh"
#include "kernels/gpu/device/ring_position.cuh"

namespace jax_ep::gpu {

inline constexpr uint32_t kFlagPublishers = 2;  // warps

// In shared memory.
template <uint32_t kMostWarps>
class RoundFlags {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
 public:
  // One thread, before FenceBarrierInit and a SyncBlock. num_warps: that send.
  __device__ void Init(uint32_t num_warps) {
    for (uint32_t publisher = 0; publisher < kFlagPublishers; ++publisher) {
      BarrierInit(&stored_[publisher], num_warps);
      BarrierInit(&published_[publisher], kWarpArrivals);
    }
  }

  // One lane of each warp that sends, once per round, when what the warp has stored in it is as if
  // this thread had stored it. `what`: for the publisher. `at` moves with the rounds.
  __device__ void HandOver(RingPosition& at, uint64_t what) {
    BarrierWait(&published_[at.slot], at.parity ^ 1);
    sent_[at.slot][WarpId()] = what;
    BarrierArrive(&stored_[at.slot]);
    at.Advance(kFlagPublishers);
  }

  // One warp: a publisher by its number. set_flags(round, what): by all lanes, what[warp] as handed
  // over; relaxed stores will do.
  template <typename SetFlags>
  __device__ void Publish(uint32_t publisher, uint32_t num_rounds, SetFlags&& set_flags) {
    uint32_t parity = 0;
    for (uint32_t round = publisher; round < num_rounds; round += kFlagPublishers, parity ^= 1) {
      BarrierWait(&stored_[publisher], parity);
      FenceSys();
      set_flags(round, sent_[publisher]);
      SyncWarp();
      if (ArrivesForWarp()) BarrierArrive(&published_[publisher]);
    }
  }

#endif
 private:
  uint64_t stored_[kFlagPublishers];     // mbarriers
  uint64_t published_[kFlagPublishers];  // mbarriers
  uint64_t sent_[kFlagPublishers][kMostWarps];
};

}  // namespace jax_ep::gpu
