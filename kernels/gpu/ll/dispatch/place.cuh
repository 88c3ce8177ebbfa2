// What placing a token of an LL dispatch needs besides the copies of its row: its rows here, its
// weights, and the wait for its pieces. place_bulk.cuh copies in bulk, lanes/ll_place.cuh by lanes.
#pragma once

#include "kernels/gpu/device/deliver_records.cuh"
#include "kernels/gpu/ll/dispatch/source_words.cuh"

namespace jax_ep::gpu::ll {

// One token's pairs here. In shared memory, one per warp.
struct PlacedRows {
  int32_t by_k[kMaxTopK];
  int32_t rows[kMaxTopK];
};

// One warp: what it has to know of a token before it places its row, on its way once it is loaded.
struct TokenFacts {
  TokenEntries entries;
  uint64_t weights[kEntriesPerLane];

  __device__ void Load(const LlDispatchKernelParams& params, const SourceWords& words,
                       const RowIndex& index, uint32_t source, uint32_t token) {
    const uint32_t top_k = params.device.shape.top_k;
    entries.Load(index, source, token, top_k);
    if (params.recv_weights == nullptr) return;
#pragma unroll
    for (uint32_t i = 0; i < kEntriesPerLane; ++i) {
      const uint32_t k = i * kWarpSize + LaneId();
      if (k < top_k) weights[i] = words.LoadWeight(source, token * top_k + k);
    }
  }
};

// One warp: rows of a token in the order of k; by_k as well. In rank_major its pairs share a row.
__device__ inline uint32_t FindPlacedRows(const LlDispatchKernelParams& params,
                                          const RowIndex& index, const TokenEntries& entries,
                                          PlacedRows& item) {
  const uint32_t top_k = params.device.shape.top_k;
  uint32_t count = 0;
  SyncWarp();  // the item before has been read
#pragma unroll
  for (uint32_t i = 0; i < kEntriesPerLane; ++i) {
    const uint32_t k = i * kWarpSize + LaneId();
    const int32_t row = k < top_k ? index.RowOf(entries.of_lane[i]) : kNoRow;
    const LaneMask with_row = Ballot(row >= 0);
    if (k < top_k) item.by_k[k] = row;
    if (row >= 0) item.rows[count + CountLanes(with_row & LanesBelow())] = row;
    count += CountLanes(with_row);
  }
  SyncWarp();
  return params.plan.layout == Layout::kRankMajor && count > 1 ? 1 : count;
}

// One warp: everything about a token of a source but its row.
__device__ inline void WriteItem(const LlDispatchKernelParams& params, const SourceWords& words,
                                 uint32_t source, uint32_t token, const TokenFacts& facts,
                                 const PlacedRows& item, uint32_t num_rows) {
  const GroupShape& shape = params.device.shape;
  const uint32_t top_k = shape.top_k;
  const uint32_t first_cell = token * top_k;
  const bool is_rank_major = params.plan.layout == Layout::kRankMajor;
  const uint64_t own_row = RankMajorRow(params, source, token);
  if (is_rank_major && LaneId() == 0) {
    if (params.is_routed) {
      uint32_t k = 0;
      while (k < top_k && item.by_k[k] < 0) ++k;
      params.plan.out.recv_src[own_row] =
          k == top_k ? -1
                     : static_cast<int32_t>(source * shape.max_tokens * top_k + first_cell + k);
    }
    if (params.recv_dots != nullptr && num_rows == 0) params.recv_dots[own_row] = 0.0f;
    if (num_rows > 0 && !params.round.is_plan_alone) {
      CountUp(&ControlOf(params.device)->rows_received, 1);
    }
  }
  if (params.recv_weights == nullptr) return;
#pragma unroll
  for (uint32_t i = 0; i < kEntriesPerLane; ++i) {
    const uint32_t k = i * kWarpSize + LaneId();
    if (k >= top_k) continue;
    const uint64_t cell = own_row * top_k + k;
    const bool is_here = params.is_routed || !is_rank_major
                             ? item.by_k[k] >= 0
                             : params.plan.out.recv_topk_idx[cell] >= 0;
    if (!is_here && !is_rank_major) continue;
    params.recv_weights[is_rank_major ? cell : item.by_k[k]] =
        is_here ? words.Weight(source, first_cell + k, facts.weights[i]) : 0.0f;
  }
}

// Whether a source's rows come through the slot set.
__device__ inline bool IsPushed(const LlDispatchKernelParams& params, uint32_t source) {
  return source != params.device.rank || params.part == CallPart::kDone;
}

// One warp waits for pieces of a row. False: this rank has failed.
__device__ inline bool WaitPieces(const LlDispatchKernelParams& params, const CallSlot& slot,
                                  uint32_t source, uint32_t token, uint32_t begin, uint32_t end) {
  if (!IsPushed(params, source)) return true;
  const DeviceRank& device = params.device;
  bool is_ok = true;
  for (uint32_t piece = begin + LaneId(); piece < end; piece += kWarpSize) {
    const uint64_t flag = PieceFlag(device.layout.ll_dispatch, slot.set, source, token, piece);
    is_ok &= WaitExactFlag(device, OwnHeapAt<uint64_t>(device, flag), source, params.operation,
                           StartFlag(slot, params.start_operation));
  }
  return AllHaveWaited(is_ok);
}

// One warp. In rank_major a token has a row here even if none of its pairs does.
template <typename Word>
__device__ void ZeroUnusedRow(const LlDispatchKernelParams& params, uint32_t source, uint32_t token,
                              WordRange range) {
  if (params.plan.layout != Layout::kRankMajor || !params.zero_padding) return;
  const uint64_t row = RankMajorRow(params, source, token);
  WarpZeroWords<Word>(params.recv_x + row * params.row_bytes, range);
  if (range.begin == 0) ZeroScales(params.format, params.scales, row);
}

}  // namespace jax_ep::gpu::ll
