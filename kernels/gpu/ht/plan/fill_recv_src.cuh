// Third kernel of a plan in three steps: what each received row holds, from the lists of all ranks.
#pragma once

#include "kernels/gpu/ht/plan/params.cuh"
#include "kernels/gpu/network/stage_layout.h"

namespace jax_ep::gpu::planning {

// The plan list of `source`; of another node's rank the part that names rows of this one.
__device__ inline const int32_t* ListOf(const DeviceRank& device, uint32_t source) {
  if (IsMate(device, source)) return HeapAt<int32_t>(device, source, device.layout.plan_list);
  const uint32_t node = device.node_begin / device.shape.node_size;
  return OwnHeapAt<int32_t>(
      device, device.layout.remote_lists.At(0, RemoteIndex(device.shape, node, source)));
}

__device__ inline void FillFromLists(const PlanKernelParams& params) {
  const DeviceRank& device = params.device;
  const uint32_t num_ranks = device.shape.num_ranks;
  const uint32_t num_segments = device.shape.num_experts;  // E_l * N
  auto* segments = reinterpret_cast<PlanSegment*>(shared_ints);
  const auto* from = OwnHeapAt<PlanSegment>(device, device.layout.segments);
  for (uint32_t i = threadIdx.x; i < num_segments; i += kThreads) segments[i] = from[i];
  SyncBlock();
  const uint64_t source_codes = device.shape.max_tokens * device.shape.top_k;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kThreads;
  for (uint64_t first = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
       first < static_cast<uint64_t>(params.recv_rows); first += kBatch * step) {
    int32_t srcs[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const auto row = static_cast<int64_t>(first + i * step);
      // The last segment that begins at or before the row.
      uint32_t low = 0;
      uint32_t high = num_segments;
      while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        (segments[middle].row_begin <= row ? low : high) = middle;
      }
      const PlanSegment segment = segments[low];
      const int64_t index = row - segment.row_begin;
      srcs[i] = -1;
      if (row < params.recv_rows && index >= 0 && index < segment.num_kept) {
        const uint32_t source = low % num_ranks;
        const int32_t* list = ListOf(device, source);
        srcs[i] = static_cast<int32_t>(source * source_codes) + list[segment.list_begin + index];
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint64_t row = first + i * step;
      if (row < static_cast<uint64_t>(params.recv_rows)) params.out.recv_src[row] = srcs[i];
    }
  }
}

__device__ inline void FillRankMajor(const PlanKernelParams& params) {
  const DeviceRank& device = params.device;
  const uint32_t top_k = device.shape.top_k;
  const auto experts = static_cast<int32_t>(device.shape.experts_per_rank());
  const int32_t own_first = static_cast<int32_t>(device.rank) * experts;
  const uint64_t source_codes = device.shape.max_tokens * top_k;
  for (uint64_t row = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
       row < static_cast<uint64_t>(params.recv_rows);
       row += static_cast<uint64_t>(gridDim.x) * kThreads) {
    const auto source = static_cast<uint32_t>(row / params.num_tokens);
    const uint64_t first = row % params.num_tokens * top_k;
    const int32_t* ids = ListOf(device, source) + first;
    const bool is_active = IsActive(device, source);
    int32_t src = -1;
    for (uint32_t k = 0; k < top_k; ++k) {
      const int32_t local = ids[k] - own_first;
      const bool is_here = is_active && ids[k] >= 0 && local >= 0 && local < experts;
      params.out.recv_topk_idx[row * top_k + k] = is_here ? local : -1;
      if (is_here && src < 0) src = static_cast<int32_t>(source * source_codes + first + k);
    }
    params.out.recv_src[row] = src;
  }
}

}  // namespace jax_ep::gpu::planning
