// Water-filling (docs/semantics.md "Rows of each layout"): how many blocks of rows each expert of a
// rank may have, so that those of all fit, and the zones that follow.
#pragma once

#include "kernels/gpu/device/warp.cuh"

namespace jax_ep::gpu {

struct WaterLevel {
  int32_t blocks;  // that every expert may have
  int32_t left;    // experts with more demand, the first ones, that may have one more
};

// One warp. blocks_of(expert) is its demand.
template <typename BlocksOf>
__device__ inline WaterLevel FindWaterLevel(uint32_t experts, int32_t blocks_that_fit,
                                            BlocksOf&& blocks_of) {
  const auto capped_sum = [&](int32_t cap) {
    int32_t sum = 0;
    for (uint32_t e = LaneId(); e < experts; e += kWarpSize) sum += min(blocks_of(e), cap);
    return WarpSum(sum);
  };
  int32_t largest = 0;
  for (uint32_t e = LaneId(); e < experts; e += kWarpSize) largest = max(largest, blocks_of(e));
  int32_t cap = WarpMax(largest);
  if (capped_sum(cap) > blocks_that_fit) {
    int32_t beyond = cap;
    cap = 0;
    while (beyond - cap > 1) {
      const int32_t middle = cap + (beyond - cap) / 2;
      (capped_sum(middle) <= blocks_that_fit ? cap : beyond) = middle;
    }
  }
  return {cap, blocks_that_fit - capped_sum(cap)};
}

// One warp: the zones of one rank's experts in expert_major, from `first_expert` on. Arrays are
// those of all experts: pairs, rows of the zone, its first row.
__device__ inline void FillZones(uint32_t experts, int32_t align, int32_t rank_rows,
                                 uint32_t first_expert, const int32_t* all_demand, int32_t* zone,
                                 int32_t* zone_begin) {
  const int32_t* demand = all_demand + first_expert;
  const auto blocks_of = [&](uint32_t e) { return (demand[e] + align - 1) / align; };
  auto [cap, left] = FindWaterLevel(experts, rank_rows / align, blocks_of);
  int32_t begin = 0;
  for (uint32_t first = 0; first < experts; first += kWarpSize) {
    const uint32_t e = first + LaneId();
    const int32_t blocks = e < experts ? blocks_of(e) : 0;
    const LaneMask short_lanes = Ballot(blocks > cap);
    const auto position = static_cast<int32_t>(CountLanes(short_lanes & LanesBelow()));
    const int32_t extra = blocks > cap && position < left ? 1 : 0;
    const int32_t rows = align * (min(blocks, cap) + extra);
    const int32_t inclusive = WarpInclusiveSum(rows);
    if (e < experts) {
      zone[first_expert + e] = rows;
      zone_begin[first_expert + e] = begin + inclusive - rows;
    }
    begin += FromLane(inclusive, kWarpSize - 1);
    left -= min(left, static_cast<int32_t>(CountLanes(short_lanes)));
  }
}

}  // namespace jax_ep::gpu
