// The senders of an LL dispatch (ll_dispatch.cu).
#pragma once

#include "kernels/gpu/ll_params.cuh"

namespace jax_ep::gpu::ll {

// One warp. Whether any pair of the token goes to `dest`.
__device__ inline bool GoesTo(const LlDispatchKernelParams& params, uint32_t token, uint32_t dest) {
  const GroupShape& shape = params.device.shape;
  const uint64_t first = static_cast<uint64_t>(token) * shape.top_k;
  const uint32_t rank_rows = shape.num_ranks * params.plan.num_tokens;
  bool goes = false;
  for (uint32_t k = LaneId(); k < shape.top_k; k += kWarpSize) {
    if (params.is_routed) {
      const auto expert = static_cast<uint32_t>(params.topk_idx[first + k]);
      goes |= expert < shape.num_experts && expert / shape.experts_per_rank() == dest;
    } else {
      const int32_t slot = params.given_slots[first + k];
      goes |= slot >= 0 && static_cast<uint32_t>(slot) / rank_rows == dest;
    }
  }
  return Ballot(goes) != 0;
}

__device__ inline void SendMeta(const LlDispatchKernelParams& params, const CallSlot& slot,
                                uint32_t dest) {
  const DeviceRank& device = params.device;
  const PushArea& area = device.layout.ll_dispatch;
  auto* block = HeapAt<std::byte>(device, dest, area.blocks.At(slot.set, device.rank));
  const uint32_t cells = params.plan.num_tokens * device.shape.top_k;
  if (params.is_routed) WarpCopyInts(block + device.layout.push_ids, params.topk_idx, cells);
  if (params.has_weights) WarpCopyInts(block + device.layout.push_weights, params.weights, cells);
  if (LaneId() == 0) {
    *reinterpret_cast<PushHeader*>(block) = {
        static_cast<int32_t>(params.plan.num_tokens), params.plan.recv_rows,
        static_cast<int32_t>(params.plan.layout), params.is_routed ? 1 : 0};
  }
  WarpPublish(device, dest, area.meta_flags.At(slot.set, device.rank),
              FlagValue(slot.started, params.operation));
}

template <typename Word>
__device__ void Send(const LlDispatchKernelParams& params, const CallSlot& slot) {
  const DeviceRank& device = params.device;
  const PushArea& area = device.layout.ll_dispatch;
  const uint32_t num_ranks = device.shape.num_ranks;
  const uint32_t first_step = params.part == Part::kStart ? 0 : 1;
  const uint32_t num_dests = num_ranks - first_step;
  if (num_dests == 0) return;
  const BlockShare share{.num_blocks = params.num_send_blocks, .block = blockIdx.x};
  const auto dest_of = [&](uint32_t step) { return (device.rank + first_step + step) % num_ranks; };
  const uint32_t num_rows = params.has_rows ? params.plan.num_tokens * num_dests : 0;
  const uint32_t num_items = num_dests + num_rows * params.pieces.count;
  const uint64_t value = FlagValue(slot.started, params.operation);
  const int32_t first_row = 0;
  Outbox outbox(device, value);
  for (uint32_t item = share.warp(); item < num_items; item += share.num_warps()) {
    if (item < num_dests) {
      if (IsMate(device, dest_of(item))) SendMeta(params, slot, dest_of(item));
      continue;
    }
    const uint32_t row = (item - num_dests) / params.pieces.count;
    const uint32_t piece = (item - num_dests) % params.pieces.count;
    const uint32_t token = row / num_dests;
    const uint32_t dest = dest_of(row % num_dests);
    if (!IsMate(device, dest) || !GoesTo(params, token, dest)) continue;
    const uint64_t place = area.blocks.At(slot.set, device.rank) + area.rows + token * area.pitch;
    WarpCopyWords<Word>(HeapAt<std::byte>(device, dest, place), 0, &first_row, 1,
                        params.x + token * params.row_bytes,
                        WordsOf(params.pieces, piece, params.row_words));
    outbox.Add(dest, PieceFlag(area, slot.set, device.rank, token, piece));
  }
  outbox.Send();
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// A whole call's. One warp per token: its row goes through shared memory to all destinations at
// once.
__device__ inline void SendInBulk(const LlDispatchKernelParams& params, const CallSlot& slot) {
  __shared__ uint64_t barriers[kWarps];
  const DeviceRank& device = params.device;
  const PushArea& area = device.layout.ll_dispatch;
  const GroupShape& shape = device.shape;
  const uint32_t num_ranks = shape.num_ranks;
  const uint32_t num_dests = num_ranks - 1;
  if (num_dests == 0) return;
  if (WarpId() >= params.num_bulk_warps) {
    const uint32_t meta_warps = kWarps - params.num_bulk_warps;
    const uint32_t first = (WarpId() - params.num_bulk_warps) * params.num_send_blocks + blockIdx.x;
    for (uint32_t step = first; step < num_dests; step += meta_warps * params.num_send_blocks) {
      SendMeta(params, slot, (device.rank + 1 + step) % num_ranks);
    }
    return;
  }
  if (!params.has_rows) return;
  const uint64_t value = FlagValue(slot.started, params.operation);
  const auto row_bytes = static_cast<uint32_t>(params.row_bytes);
  auto* row = reinterpret_cast<std::byte*>(shared_ints) + WarpId() * row_bytes;
  uint64_t* barrier = barriers + WarpId();
  if (LaneId() == 0) {
    BarrierInit(barrier, 1);
    FenceBarrierInit();
    FenceProxyAsync();  // the wait for the set's readers, before bulk stores
  }
  uint32_t parity = 0;
  const uint32_t step_of_tokens = params.num_bulk_warps * params.num_send_blocks;
  for (uint32_t token = WarpId() * params.num_send_blocks + blockIdx.x;
       token < params.plan.num_tokens; token += step_of_tokens) {
    SyncWarp();
    if (LaneId() == 0) {
      BarrierExpectBytes(barrier, row_bytes);
      BulkLoad(row, params.x + token * params.row_bytes, row_bytes, barrier);
    }
    uint64_t dests = 0;
    const uint64_t first_cell = static_cast<uint64_t>(token) * shape.top_k;
    for (uint32_t k = LaneId(); k < shape.top_k; k += kWarpSize) {
      if (params.is_routed) {
        const auto expert = static_cast<uint32_t>(params.topk_idx[first_cell + k]);
        if (expert < shape.num_experts) dests |= uint64_t{1} << (expert / shape.experts_per_rank());
      } else {
        const int32_t given = params.given_slots[first_cell + k];
        const uint32_t dest = static_cast<uint32_t>(given) / (num_ranks * params.plan.num_tokens);
        if (given >= 0 && dest < num_ranks) dests |= uint64_t{1} << dest;
      }
    }
    for (uint32_t mask = kWarpSize / 2; mask > 0; mask /= 2) dests |= FromLaneXor(dests, mask);
    dests &= ~(uint64_t{1} << device.rank);
    const uint64_t place = area.blocks.At(slot.set, device.rank) + area.rows + token * area.pitch;
    if (LaneId() == 0) {
      BarrierWait(barrier, parity);
      for (uint32_t step = 0; step < num_dests; ++step) {
        // Tokens begin with different destinations, so that links are used alike.
        const uint32_t dest = (device.rank + 1 + (step + token) % num_dests) % num_ranks;
        if ((dests >> dest & 1) == 0) continue;
        BulkStore(HeapAt<std::byte>(device, dest, place), row, row_bytes);
      }
      BulkCommit();
      BulkWaitAll();
      FenceProxyAsync();  // the stores, before their flags
    }
    parity ^= 1;
    SyncWarp();
    for (uint32_t i = LaneId(); i < num_ranks * params.pieces.count; i += kWarpSize) {
      const uint32_t dest = i / params.pieces.count;
      if ((dests >> dest & 1) == 0) continue;
      const uint64_t flag = PieceFlag(area, slot.set, device.rank, token, i % params.pieces.count);
      StoreReleaseSys(HeapAt<uint64_t>(device, dest, flag), value);
    }
  }
}
#endif

}  // namespace jax_ep::gpu::ll
