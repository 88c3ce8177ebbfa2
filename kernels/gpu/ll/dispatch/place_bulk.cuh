// Placing the rows of an LL dispatch with bulk copies: through shared memory, where each warp has
// room for one row.
#pragma once

#include "kernels/gpu/ll/dispatch/place.cuh"

namespace jax_ep::gpu::ll {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// All threads of the block.
__device__ inline void PlaceRowsInBulk(const LlDispatchKernelParams& params, const CallSlot& slot,
                                       const SourceWords& words, const TokenPartition& partition,
                                       const RowIndex& index, PlacedRows& item) {
  __shared__ uint64_t barriers[kWarps];
  const DeviceRank& device = params.device;
  const uint32_t warp = WarpId();
  if (warp >= params.num_place_warps) return;
  auto* row =
      reinterpret_cast<std::byte*>(shared_ints) + params.place_offset + warp * params.row_bytes;
  uint64_t* barrier = barriers + warp;
  if (LaneId() == 0) {
    BarrierInit(barrier, 1);
    FenceBarrierInit();
  }
  const auto row_bytes = static_cast<uint32_t>(params.row_bytes);
  const uint32_t own_items = partition.ItemsOf(device.shape.num_ranks * params.plan.num_tokens);
  TokenFacts next;
  const auto load_next = [&](uint32_t number) {
    if (number >= own_items) return;
    const auto [source, token] = partition.ItemAt(number);
    next.Load(params, words, index, source, token);
  };
  load_next(warp);
  uint64_t num_remote = 0;
  uint32_t parity = 0;
  for (uint32_t number = warp; number < own_items; number += params.num_place_warps) {
    const auto [source, token] = partition.ItemAt(number);
    const TokenFacts facts = next;
    load_next(number + params.num_place_warps);
    const uint32_t num_rows = FindPlacedRows(params, index, facts.entries, item);
    WriteItem(params, words, source, token, facts, item, num_rows);
    if (num_rows == 0) {
      ZeroUnusedRow<uint4>(params, source, token, {0, params.row_words});
      continue;
    }
    if (!WaitPieces(params, slot, source, token, 0, params.pieces.count)) break;
    num_remote += IsPushed(params, source) ? 1 : 0;
    if (LaneId() == 0) {
      const SourceWords::Rows rows = words.RowsOf(source);
      BulkWaitRead<0>();  // the row before has left its place
      FenceProxyAsync();  // what the flags have announced, before a bulk load
      BarrierExpectBytes(barrier, row_bytes);
      BulkLoad(row, rows.begin + token * rows.pitch, row_bytes, barrier);
      BarrierWait(barrier, parity);
      for (uint32_t copy = 0; copy < num_rows; ++copy) {
        BulkStore(params.recv_x + static_cast<uint64_t>(item.rows[copy]) * params.row_bytes, row,
                  row_bytes);
      }
      BulkCommit();
    }
    parity ^= 1;
  }
  if (LaneId() != 0) return;
  BulkWaitAll();
  if (num_remote > 0) CountUp(&ControlOf(device)->bytes_pulled, num_remote * params.row_bytes);
}
#endif

}  // namespace jax_ep::gpu::ll
