// The end of an operation that is one kernel (or its last), without blocks waiting for the last
// one.
//
// What an operation finds and leaves behind (its number, its set) moves on once, after all of its
// blocks have read it. The last block to end could do that, but to find out who is last takes a
// microsecond at the end of everyone's work. So blocks are counted once they have read it, while
// they work on, and the last of these moves it on.
//
// That all blocks have ended matters only after a failure, as outputs are poisoned behind the last
// write. Blocks that have failed, or have left a wait as the rank had failed, see to that, and the
// block counted last if the rank had failed by then. Each ends first, then waits for the others,
// and one of them poisons. They wait only when all blocks have been counted, hence are running;
// else whoever is counted later sees the failure. Two calls of a rank at once are a failure (kBusy)
// that leaves counts which fit no later call: none of its blocks writes anything, and the first one
// poisons.
#pragma once

#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/protocol/control.cuh"

namespace jax_ep::gpu {

// Not for an operation whose end others are told: its peers or proxies, or the trace.
__device__ inline bool HasOpenEnd(const DeviceRank& device, CallPart part) {
  return part == CallPart::kWhole && device.network == nullptr && device.stamps == nullptr;
}

class OpenEnd {
 public:
  // All threads of every block, before any can fail.
  __device__ explicit OpenEnd(const DeviceRank& device)
      : device_(device), all_blocks_(ControlOf(device)->blocks_before + gridDim.x) {
    if (threadIdx.x == 0) *GaveUpHere() = 0;
    SyncBlock();
  }

  // All threads of every block, as the last thing; no thread has anything of the operation's state
  // left to read. write(): one thread, what the operation `sequence` leaves behind besides its
  // number. poison(): all threads of a block, the outputs after a failure.
  template <typename Write, typename Poison>
  __device__ void Finish(uint64_t sequence, Write&& write, Poison&& poison) const {
    // The last warp has least to do, so that most blocks are counted while they work.
    if (threadIdx.x == blockDim.x - 1 && IsLastReader()) {
      write();
      ControlOf(device_)->blocks_before = all_blocks_;
      EndOperation(device_, sequence);
    }
    if (EndBlock()) poison();
  }

 private:
  // One thread.
  __device__ bool IsLastReader() const {
    const uint32_t others = FetchAddAcqRelGpu(&ControlOf(device_)->blocks_reading, 1u);
    if (others + 1 != all_blocks_) return false;
    static_cast<void>(SawFailure(device_));
    return true;
  }

  // All threads. True: the block must poison the outputs.
  __device__ bool EndBlock() const {
    SyncBlock();
    Control* control = ControlOf(device_);
    const bool gave_up = *GaveUpHere() != 0;
    if (!gave_up) {
      if (threadIdx.x == 0) AddReleaseGpu(&control->blocks_ended, 1u);
      return false;
    }
    SyncBlock();  // all have read the word, which now says who poisons
    if (threadIdx.x == 0) *GaveUpHere() = IsPoisoner() ? 1 : 0;
    SyncBlock();
    return *GaveUpHere() != 0;
  }

  // One thread of a block that has given up.
  __device__ bool IsPoisoner() const {
    Control* control = ControlOf(device_);
    FetchAddAcqRelGpu(&control->blocks_ended, 1u);
    if (FetchAddAcqRelGpu(&control->blocks_reading, 0u) != all_blocks_) return blockIdx.x == 0;
    const uint64_t since = ClockNs();
    while (FetchAddAcqRelGpu(&control->blocks_ended, 0u) != all_blocks_ &&
           ClockNs() - since < device_.timeout_ns) {
      SleepBriefly();
    }
    return atomicExch(&control->blocks_poisoned, all_blocks_) != all_blocks_;
  }

  const DeviceRank& device_;
  uint32_t all_blocks_;  // what both counts are once they have all blocks of this kernel
};

}  // namespace jax_ep::gpu
