// What each kernel that places pairs knows of the experts: how many pairs want them, and the rows
// that they have.
#pragma once

#include "kernels/gpu/ht/plan/params.cuh"
#include "kernels/gpu/ht/plan/water_level.cuh"

namespace jax_ep::gpu::planning {

// In shared memory.
struct ExpertZones {
  int32_t* demand;      // [E] pairs of all sources
  int32_t* zone;        // [E] rows of its zone (expert_major)
  int32_t* zone_begin;  // [E] first row of its zone

  static constexpr uint32_t kNumTables = 3;
  __device__ ExpertZones(int32_t* ints, uint32_t num_experts)
      : demand(ints), zone(demand + num_experts), zone_begin(zone + num_experts) {}

  // Pairs that are kept.
  __device__ int32_t Capacity(const PlanKernelParams& params, uint32_t expert) const {
    if (params.layout != Layout::kExpertMajor) return demand[expert];
    return demand[expert] < zone[expert] ? demand[expert] : zone[expert];
  }
  // Rows with those, and padding.
  __device__ int32_t RowsOf(const PlanKernelParams& params, uint32_t expert) const {
    if (params.layout == Layout::kExpertMajor) return zone[expert];
    return static_cast<int32_t>(params.device.shape.num_ranks * params.num_tokens);
  }

  // All threads of the block, between two SyncBlock: zones from the demand.
  __device__ void Find(const PlanKernelParams& params) const {
    const GroupShape& shape = params.device.shape;
    const uint32_t experts = shape.experts_per_rank();
    if (params.layout == Layout::kExpertMajor) {
      for (uint32_t owner = WarpId(); owner < shape.num_ranks; owner += kWarps) {
        FillZones(experts, static_cast<int32_t>(shape.align), params.recv_rows, owner * experts,
                  demand, zone, zone_begin);
      }
      return;
    }
    for (uint32_t expert = threadIdx.x; expert < shape.num_experts; expert += kThreads) {
      zone_begin[expert] =
          static_cast<int32_t>(expert % experts * shape.num_ranks * params.num_tokens);
    }
  }
};

// One thread: the counters of a plan.
__device__ inline void CountPlan(const DeviceRank& device, int32_t num_dropped, bool has_drops) {
  Control* control = ControlOf(device);
  control->plans += 1;
  control->rows_dropped += static_cast<uint64_t>(num_dropped);
  control->last_overflow = has_drops ? 1 : 0;
}

}  // namespace jax_ep::gpu::planning
