// A set of ranks or nodes that is larger than a register: its bits are spread over the lanes of a
// warp. A token has a row on at most top_k of a thousand ranks, and warps ask for few of those.
#pragma once

#include "kernels/gpu/device/warp.cuh"

namespace jax_ep::gpu {

// Numbers below kMost. Lane i holds the bits of 32 * i and the next 31. All lanes of the warp call
// every member, and none that has ended its loop before the others.
class WarpSet {
 public:
  static constexpr uint32_t kBitsPerLane = 32;
  static constexpr uint32_t kMost = kBitsPerLane * kWarpSize;

  // Each lane with `has` adds its number.
  __device__ void Add(bool has, uint32_t number) {
    for (LaneMask left = Ballot(has); left != 0; left &= left - 1) {
      AddOne(FromLane(number, CountLanes(left ^ (left - 1)) - 1));
    }
  }
  // All lanes add the same number.
  __device__ void AddOne(uint32_t number) {
    if (LaneId() == number / kBitsPerLane) bits_ |= 1u << number % kBitsPerLane;
  }
  // Of each lane's own number.
  __device__ bool Has(uint32_t number) const {
    return (FromLane(bits_, number / kBitsPerLane) >> number % kBitsPerLane & 1) != 0;
  }
  __device__ bool IsEmpty() const { return Ballot(bits_ != 0) == 0; }

 private:
  uint32_t bits_ = 0;
};

}  // namespace jax_ep::gpu
