// kernels/gpu/ht/combine: rows back to the owners of their tokens, summed.
//   In: y, recv_src, send_slot. Out: partials in the owners' heaps, the sum of each own token.
//   Waits: owners for the flag of each chunk; computing a partial for the entry flags only.
//
// What the kernels of an HT combine share: the flags of chunks, and the end of the operation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gpu/ht/combine/combine_params.h"
#include "kernels/gpu/protocol/control.cuh"
#include "kernels/gpu/protocol/entry.cuh"

namespace jax_ep::gpu {

__device__ inline const uint64_t* ChunkFlag(const DeviceRank& device, uint32_t peer,
                                            uint32_t chunk) {
  return OwnHeapAt<uint64_t>(device, device.layout.chunk_flags) + peer * device.layout.num_chunks +
         chunk;
}
// One warp waits until the partials of a chunk of all peers are here. flag_of(peer): its flag.
template <typename FlagOf>
__device__ inline bool WaitChunk(const DeviceRank& device, uint64_t value, FlagOf&& flag_of) {
  bool is_ok = true;
  for (uint32_t peer = LaneId(); peer < device.shape.num_ranks; peer += kWarpSize) {
    if (peer == device.rank) continue;
    is_ok &= WaitExactFlag(device, flag_of(peer), peer, Operation::kCombine, value);
  }
  return AllHaveWaited(is_ok);
}
// This rank's, at the owner of the chunk's tokens.
__device__ inline uint64_t* ChunkFlagAt(const DeviceRank& device, uint32_t owner, uint32_t chunk) {
  return HeapAt<uint64_t>(device, owner, device.layout.chunk_flags) +
         SenderTo(device, owner) * device.layout.num_chunks + chunk;
}
// One lane, after a release by the warps that stored the partials of the chunk: publishes them.
__device__ inline void PublishChunk(const DeviceRank& device, uint32_t owner, uint32_t chunk,
                                    uint64_t value) {
  StoreReleaseSys(ChunkFlagAt(device, owner, chunk), value);
}

// Where `holder` puts the scalars of a token of `owner`, in its reduce area: [K].
__device__ inline float* ScalarsAt(const DeviceRank& device, uint32_t owner, uint32_t holder,
                                   uint64_t token) {
  const uint64_t block = GpuHeapLayout::ReduceBlock(device.shape.num_ranks, owner, holder);
  return HeapAt<float>(device, owner, device.layout.reduce_scalars) +
         (block * device.layout.rounds.tokens + token) * device.shape.top_k;
}

// All threads of the block, as the last thing of the combine `sequence`; `shared_flag` is in shared
// memory. True in the block that comes last.
__device__ inline bool FinishCombine(const CombineKernelParams& params, uint64_t sequence,
                                     uint32_t* shared_flag) {
  const DeviceRank& device = params.device;
  if (!LastToArrive(device, shared_flag)) return false;
  if (threadIdx.x == 0) {
    Control* control = ControlOf(device);
    CountUp(&control->combines, 1);
    control->partials_taken = 0;
    control->sums_taken = 0;
    control->blocks_started = 0;
    ForgetEntry(device);
    EndOperation(device, sequence);
  }
  if (HasFailed(device)) {
    PoisonBytes(params.out, params.num_tokens * params.row_bytes);
    PoisonBytes(params.pair_scalars_out,
                static_cast<uint64_t>(params.num_tokens) * device.shape.top_k * sizeof(float));
  }
  return true;
}

}  // namespace jax_ep::gpu
