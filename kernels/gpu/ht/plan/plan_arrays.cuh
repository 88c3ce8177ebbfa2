// The arrays of a plan, whichever kernel makes it.
#pragma once

#include "kernels/gpu/protocol/control.cuh"
#include "kernels/launch.h"

namespace jax_ep::gpu {

struct PlanArrays {
  int32_t* group_sizes;    // [E_l]
  int32_t* group_counts;   // [E_l]
  int32_t* send_slot;      // [T * K]
  int32_t* recv_src;       // [R]
  int32_t* send_counts;    // [N]
  int32_t* recv_counts;    // [N]
  int32_t* num_dropped;    // []
  int32_t* overflow;       // []
  int32_t* recv_topk_idx;  // [N * T * K] in rank_major
};

inline PlanArrays ArraysOf(const PlanOutputs& out) {
  return {
      out.group_sizes.data(),  out.group_counts.data(), out.send_slot.data(), out.recv_src.data(),
      out.send_counts.data(),  out.recv_counts.data(),  out.num_dropped,      out.overflow,
      out.recv_topk_idx.data()};
}

// All threads of one block: what a plan says when its operation has failed.
__device__ inline void PoisonPlan(const GroupShape& shape, Layout layout, uint64_t num_pairs,
                                  uint64_t recv_rows, const PlanArrays& plan) {
  ZeroInts(plan.group_sizes, shape.experts_per_rank());
  ZeroInts(plan.group_counts, shape.experts_per_rank());
  ZeroInts(plan.send_counts, shape.num_ranks);
  ZeroInts(plan.recv_counts, shape.num_ranks);
  PoisonBytes(plan.send_slot, num_pairs * sizeof(int32_t));
  PoisonBytes(plan.recv_src, recv_rows * sizeof(int32_t));
  PoisonBytes(plan.num_dropped, sizeof(int32_t));
  PoisonBytes(plan.overflow, sizeof(int32_t));
  if (layout == Layout::kRankMajor) {
    PoisonBytes(plan.recv_topk_idx, recv_rows * shape.top_k * sizeof(int32_t));
  }
}

}  // namespace jax_ep::gpu
