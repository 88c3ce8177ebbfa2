// kernels/gpu/ht/plan: the row of the expert's rank that each pair (token, k) gets.
//   In: topk_idx of this rank. Out: send_slot, recv_src, counts and group sizes.
//   Waits: every rank for the counts of all ranks; in three steps then for their lists of pairs.
//
// What the kernels of a plan share.
#pragma once

#include "kernels/gpu/device/divisor.h"
#include "kernels/gpu/ht/plan/plan_arrays.cuh"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/protocol/control.cuh"

namespace jax_ep::gpu::planning {

inline constexpr uint32_t kThreads = 512;
inline constexpr uint32_t kWarps = kThreads / kWarpSize;
inline constexpr uint64_t kMinPairsPerBlock = 1024;
// Items of a thread whose loads are in flight together.
inline constexpr uint32_t kBatch = 4;

struct PlanKernelParams {
  DeviceRank device;
  Layout layout;
  Mode mode;
  bool counts_load;  // as in PlanParams
  uint32_t num_tokens;
  int32_t recv_rows;
  uint32_t num_pairs;        // T * K
  uint32_t pairs_per_block;  // of block or slice b the pairs from b * pairs_per_block
  uint32_t pairs_per_warp;   // of them warp w those from w * pairs_per_warp
  uint32_t num_warps;        // that count, as many as have room for a histogram
  uint32_t num_blocks;       // that have pairs; slices of a plan with one exchange
  Divisor by_experts_per_rank;
  Divisor by_top_k;
  const int32_t* topk_idx;  // [T * K]
  PlanArrays out;
};

extern __shared__ int32_t shared_ints[];

__device__ inline uint64_t CountsOf(const DeviceRank& device, uint64_t sequence, uint32_t source) {
  return device.layout.plan_counts.At(sequence % 2, source);
}

}  // namespace jax_ep::gpu::planning
