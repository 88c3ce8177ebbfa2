// Water-filling (docs/semantics.md "Rows of each layout"): how many blocks of rows each expert of a
// rank may have, so that those of all fit, and the zones that follow.
#pragma once

#include <climits>

#include "kernels/gpu/device/warp.cuh"

namespace jax_ep::gpu {

struct WaterLevel {
  int32_t blocks;  // that every expert may have
  int32_t left;    // experts with more demand, the first ones, that may have one more
};

// One warp, where not all fit. blocks [experts]: the demand.
__device__ inline WaterLevel FindWaterLevel(uint32_t experts, int32_t blocks_that_fit,
                                            const int32_t* blocks) {
  const auto capped_sum = [&](int32_t cap) {
    int32_t sum = 0;
    for (uint32_t e = LaneId(); e < experts; e += kWarpSize) sum += min(blocks[e], cap);
    return WarpSum(sum);
  };
  int32_t largest = 0;
  for (uint32_t e = LaneId(); e < experts; e += kWarpSize) largest = max(largest, blocks[e]);
  int32_t cap = 0;
  int32_t beyond = WarpMax(largest);
  while (beyond - cap > 1) {
    const int32_t middle = cap + (beyond - cap) / 2;
    (capped_sum(middle) <= blocks_that_fit ? cap : beyond) = middle;
  }
  return {cap, blocks_that_fit - capped_sum(cap)};
}

// One warp: the zones of one rank's experts in expert_major, from `first_expert` on. Arrays are
// those of all experts: pairs, rows of the zone, its first row. A lane has neighbours, so that one
// sum over the lanes is enough.
__device__ inline void FillZones(uint32_t experts, int32_t align, int32_t rank_rows,
                                 uint32_t first_expert, const int32_t* all_demand,
                                 int32_t* all_zone, int32_t* all_zone_begin) {
  const int32_t* demand = all_demand + first_expert;
  int32_t* zone = all_zone + first_expert;  // blocks of rows, until they are rows
  const uint32_t per_lane = (experts + kWarpSize - 1) / kWarpSize;
  const uint32_t begin = min(LaneId() * per_lane, experts);
  const uint32_t end = min(begin + per_lane, experts);
  const int32_t blocks_that_fit = rank_rows / align;
  int32_t blocks = 0;
  for (uint32_t e = begin; e < end; ++e) {
    zone[e] = (demand[e] + align - 1) / align;
    blocks += zone[e];
  }
  WaterLevel level{INT_MAX, 0};
  int32_t num_short = 0;  // experts of lower lanes with more demand
  SyncWarp();
  if (WarpSum(blocks) > blocks_that_fit) {
    level = FindWaterLevel(experts, blocks_that_fit, zone);
    for (uint32_t e = begin; e < end; ++e) num_short += zone[e] > level.blocks ? 1 : 0;
    num_short = WarpInclusiveSum(num_short) - num_short;
    SyncWarp();  // all have read what is written now
    blocks = 0;
    for (uint32_t e = begin; e < end; ++e) {
      if (zone[e] > level.blocks) zone[e] = level.blocks + (num_short++ < level.left ? 1 : 0);
      blocks += zone[e];
    }
  }
  int32_t first_row = (WarpInclusiveSum(blocks) - blocks) * align;
  for (uint32_t e = begin; e < end; ++e) {
    const int32_t rows = zone[e] * align;
    zone[e] = rows;
    all_zone_begin[first_expert + e] = first_row;
    first_row += rows;
  }
}

}  // namespace jax_ep::gpu
