// Where the row of a token goes in an LL dispatch.
#pragma once

#include "kernels/gpu/ll/dispatch/params.cuh"

namespace jax_ep::gpu::ll {

// One warp: the mates that pairs of a token go to, none beyond the last token. What that takes is
// on its way once it is made.
class Destinations {
 public:
  __device__ Destinations(const LlDispatchKernelParams& params, uint32_t token) : params_(params) {
    const uint32_t top_k = params.device.shape.top_k;
    const int32_t* ids = (params.is_routed ? params.topk_idx : params.given_slots) +
                         static_cast<uint64_t>(token) * top_k;
#pragma unroll
    for (uint32_t i = 0; i < kEntriesPerLane; ++i) {
      const uint32_t k = i * kWarpSize + LaneId();
      ids_[i] = k < top_k && token < params.plan.num_tokens ? ids[k] : -1;
    }
  }
  // A bit per mate, by local rank; what serves one node alone takes that for the rank.
  __device__ uint64_t Mask() const {
    const GroupShape& shape = params_.device.shape;
    uint64_t mask = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEntriesPerLane; ++i) {
      const uint32_t local =
          static_cast<uint32_t>(ids_[i]) / params_.rank_ids - params_.device.node_begin;
      if (ids_[i] >= 0 && local < shape.node_size) mask |= uint64_t{1} << local;
    }
    return WarpOr(mask);
  }

 private:
  const LlDispatchKernelParams& params_;
  int32_t ids_[kEntriesPerLane];
};

}  // namespace jax_ep::gpu::ll
