// What a warp (a wavefront on AMD) or a block does together. The only file that knows how wide a
// warp is: 32 lanes, on AMD 64. A lane never waits for another lane of its warp: lanes of a
// wavefront that wait keep the others from running.
#pragma once

#include <cstdint>

#include "kernels/gpu/device/memory_order.cuh"
#include "kernels/gpu/device/vendor.h"

namespace jax_ep::gpu {

#if JAX_EP_HIP
#if defined(__HIP_DEVICE_COMPILE__) && !defined(__GFX9__)
#error "wavefronts of 64 lanes are assumed: gfx942, gfx950"
#endif
inline constexpr uint32_t kWarpSize = 64;
using LaneMask = uint64_t;

// Lanes run in step, so only the compiler must be kept from moving accesses to memory.
__device__ inline void SyncWarp() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
__device__ inline void SyncBlock() {
  ReleaseToBlock();
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// A SyncBlock that tells all threads whether the predicate holds for any.
__device__ inline bool SyncBlockAny(bool predicate) {
  SyncBlock();
  return __syncthreads_or(predicate ? 1 : 0) != 0;
}
__device__ inline LaneMask Ballot(bool predicate) { return __builtin_amdgcn_ballot_w64(predicate); }
__device__ inline bool AllLanes(bool predicate) { return Ballot(predicate) == Ballot(true); }
template <typename T>
__device__ inline T FromLane(T value, uint32_t lane) {
  static_assert(sizeof(T) % sizeof(int) == 0);
  int words[sizeof(T) / sizeof(int)];
  __builtin_memcpy(words, &value, sizeof(value));
  for (int& word : words) {
    word = __builtin_amdgcn_ds_bpermute(static_cast<int>(lane * sizeof(int)), word);
  }
  __builtin_memcpy(&value, words, sizeof(value));
  return value;
}
template <typename T>
__device__ inline T FromLaneBelow(T value, uint32_t distance) {
  const uint32_t lane = threadIdx.x % kWarpSize;
  return FromLane(value, lane >= distance ? lane - distance : lane);
}
template <typename T>
__device__ inline T FromLaneXor(T value, uint32_t mask) {
  return FromLane(value, threadIdx.x % kWarpSize ^ mask);
}
__device__ inline uint32_t CountLanes(LaneMask mask) {
  return static_cast<uint32_t>(__builtin_popcountll(mask));
}
// Lanes that hold the same value as this one. One round per different value.
__device__ inline LaneMask LanesWithSame(int32_t value) {
  LaneMask same = 0;
  for (LaneMask left = Ballot(true); left != 0;) {
    const int32_t first = __builtin_amdgcn_readlane(value, __builtin_ctzll(left));
    const LaneMask equal = Ballot(value == first);
    if (value == first) same = equal;
    left &= ~equal;
  }
  return same;
}
#else
inline constexpr uint32_t kWarpSize = 32;
using LaneMask = uint32_t;
inline constexpr LaneMask kAllLanes = 0xffffffffu;

__device__ inline void SyncWarp() { __syncwarp(); }
__device__ inline void SyncBlock() { __syncthreads(); }
__device__ inline bool SyncBlockAny(bool predicate) {
  return __syncthreads_or(predicate ? 1 : 0) != 0;
}
__device__ inline LaneMask Ballot(bool predicate) { return __ballot_sync(kAllLanes, predicate); }
__device__ inline bool AllLanes(bool predicate) { return __all_sync(kAllLanes, predicate) != 0; }
template <typename T>
__device__ inline T FromLane(T value, uint32_t lane) {
  return __shfl_sync(kAllLanes, value, static_cast<int>(lane));
}
template <typename T>
__device__ inline T FromLaneBelow(T value, uint32_t distance) {
  return __shfl_up_sync(kAllLanes, value, distance);
}
template <typename T>
__device__ inline T FromLaneXor(T value, uint32_t mask) {
  return __shfl_xor_sync(kAllLanes, value, static_cast<int>(mask));
}
__device__ inline uint32_t CountLanes(LaneMask mask) { return static_cast<uint32_t>(__popc(mask)); }
__device__ inline LaneMask LanesWithSame(int32_t value) {
  return __match_any_sync(kAllLanes, value);
}
#endif

// Of the lanes that are here with this value, which need not all be: whether it is the first.
__device__ inline bool IsFirstLaneWith(uint32_t value) {
#if JAX_EP_HIP
  const LaneMask same = LanesWithSame(static_cast<int32_t>(value));
  return threadIdx.x % kWarpSize == static_cast<uint32_t>(__builtin_ctzll(same));
#else
  const LaneMask same = __match_any_sync(__activemask(), value);
  return threadIdx.x % kWarpSize == static_cast<uint32_t>(__ffs(static_cast<int>(same))) - 1;
#endif
}

__device__ inline uint32_t LaneId() { return threadIdx.x % kWarpSize; }
__device__ inline uint32_t WarpId() { return threadIdx.x / kWarpSize; }
__device__ inline LaneMask LanesBelow() { return (LaneMask{1} << LaneId()) - 1; }

__device__ inline int32_t WarpSum(int32_t value) {
  for (uint32_t mask = kWarpSize / 2; mask > 0; mask /= 2) value += FromLaneXor(value, mask);
  return value;
}
__device__ inline uint64_t WarpOr(uint64_t bits) {
  for (uint32_t mask = kWarpSize / 2; mask > 0; mask /= 2) bits |= FromLaneXor(bits, mask);
  return bits;
}
__device__ inline int32_t WarpMax(int32_t value) {
  for (uint32_t mask = kWarpSize / 2; mask > 0; mask /= 2) {
    const int32_t other = FromLaneXor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}
// Sum over this lane and those below it.
__device__ inline int32_t WarpInclusiveSum(int32_t value) {
  for (uint32_t distance = 1; distance < kWarpSize; distance *= 2) {
    const int32_t below = FromLaneBelow(value, distance);
    if (LaneId() >= distance) value += below;
  }
  return value;
}

}  // namespace jax_ep::gpu
