// Water-filling (docs/semantics.md "Rows of each layout"): how many blocks of rows each expert of a
// rank may have, so that those of all fit.
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

}  // namespace jax_ep::gpu
