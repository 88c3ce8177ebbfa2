// The end of an operation that is one kernel, without its blocks waiting for the last of them.
//
// What an operation finds and leaves behind (its number, its set) moves on once, after all of its
// blocks have read it. The last block to end could do that, but to find out who is last takes a
// microsecond at the end of everyone's work. So blocks are counted once they have read it, while
// they work on, and the last of these moves it on.
//
// That all blocks have ended matters only after a failure, as outputs are poisoned behind the last
// write. Two blocks see to that, each after it has ended itself: the one that found the failure, if
// all blocks had been counted by then, and the block counted last, if the rank had failed by then.
// At least one of them is there: whoever is counted after the failure sees it. And all blocks that
// they wait for are running, since these have been counted.
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

  // One thread of every block, when the block has read what the operation leaves behind. True: all
  // others have, too, and it must now write that, EndOperation included.
  __device__ bool IsLastReader() const {
    Control* control = ControlOf(device_);
    if (FetchAddAcqRelGpu(&control->blocks_reading, 1u) + 1 != all_blocks_) return false;
    if (HasFailed(device_)) *GaveUpHere() = 1;
    control->blocks_before = all_blocks_;
    return true;
  }

  // All threads of every block, as the last thing. True: the block must poison the outputs.
  __device__ bool EndBlock() const {
    SyncBlock();
    Control* control = ControlOf(device_);
    if (*GaveUpHere() == 0) {
      if (threadIdx.x == 0) AddReleaseGpu(&control->blocks_ended, 1u);
      return false;
    }
    if (threadIdx.x == 0) {
      FetchAddAcqRelGpu(&control->blocks_ended, 1u);
      const bool have_all_read = FetchAddAcqRelGpu(&control->blocks_reading, 0u) == all_blocks_;
      const uint64_t since = ClockNs();
      while (have_all_read && FetchAddAcqRelGpu(&control->blocks_ended, 0u) != all_blocks_ &&
             ClockNs() - since < device_.timeout_ns) {
        SleepBriefly();
      }
      if (!have_all_read) *GaveUpHere() = 0;
    }
    SyncBlock();
    return *GaveUpHere() != 0;
  }

 private:
  const DeviceRank& device_;
  uint32_t all_blocks_;  // what both counts are once they have all blocks of this kernel
};

}  // namespace jax_ep::gpu
