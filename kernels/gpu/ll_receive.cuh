// The receivers of an LL dispatch (ll_dispatch.cu).
#pragma once

#include "kernels/gpu/ll_params.cuh"

namespace jax_ep::gpu::ll {

// One token's pairs here. In shared memory, one per warp.
struct ItemRows {
  int32_t by_k[kMaxTopK];
  int32_t rows[kMaxTopK];
};

// What `source` sent before its rows.
struct SourceMeta {
  const int32_t* ids;
  const float* weights;
  const std::byte* rows;
  uint64_t pitch;
};

__device__ inline SourceMeta MetaOf(const LlDispatchKernelParams& params, uint32_t set,
                                    uint32_t source) {
  const DeviceRank& device = params.device;
  if (params.part == Part::kWhole && source == device.rank) {
    return {params.topk_idx, params.weights, params.x, params.row_bytes};
  }
  const PushArea& area = device.layout.ll_dispatch;
  const auto* block = OwnHeapAt<std::byte>(device, area.blocks.At(set, source));
  return {reinterpret_cast<const int32_t*>(block + device.layout.push_ids),
          reinterpret_cast<const float*>(block + device.layout.push_weights), block + area.rows,
          area.pitch};
}

// All threads of the block. False: a peer failed or runs another call.
__device__ inline bool WaitMeta(const LlDispatchKernelParams& params, const CallSlot& slot,
                                uint32_t* word) {
  const DeviceRank& device = params.device;
  const PushArea& area = device.layout.ll_dispatch;
  if (!BlockWaitPeers(device, area.meta_flags.At(slot.set), params.operation,
                      FlagValue(slot.started, params.start_operation), word)) {
    return false;
  }
  if (threadIdx.x == 0) *word = 1;
  SyncBlock();
  for (uint32_t source = threadIdx.x; source < device.shape.num_ranks; source += kThreads) {
    if (source == device.rank) continue;
    const auto& header = *OwnHeapAt<PushHeader>(device, area.blocks.At(slot.set, source));
    if (header.num_tokens == static_cast<int32_t>(params.plan.num_tokens) &&
        // A start half does not know its receive rows and sends 0.
        (header.recv_rows == 0 || header.recv_rows == params.plan.recv_rows) &&
        header.layout == static_cast<int32_t>(params.plan.layout) &&
        header.has_ids == (params.is_routed ? 1 : 0)) {
      continue;
    }
    *word = 0;
    Fail(device, FailureKind::kWrongOrder, params.operation, source,
         static_cast<uint64_t>(params.plan.recv_rows), static_cast<uint64_t>(header.recv_rows));
  }
  SyncBlock();
  const bool is_ok = *word != 0;
  SyncBlock();
  return is_ok;
}

// Rows of expert_major and expert_batched that no pair fills: this block's share.
template <typename Word, typename IsUsed>
__device__ void FillUnused(const LlDispatchKernelParams& params, const BlockShare& share,
                           IsUsed&& is_used) {
  const auto num_rows = static_cast<uint64_t>(params.plan.recv_rows);
  const uint64_t step = static_cast<uint64_t>(share.num_warps()) * kWarpSize;
  int32_t num_used = 0;
  for (uint64_t first = static_cast<uint64_t>(share.warp()) * kWarpSize; first < num_rows;
       first += step) {
    const uint64_t row = first + LaneId();
    const bool is_unused = row < num_rows && !is_used(row);
    num_used += row < num_rows && !is_unused;
    if (is_unused) {
      if (params.is_routed) params.plan.out.recv_src[row] = -1;
      if (params.recv_weights != nullptr) params.recv_weights[row] = 0.0f;
      if (params.recv_dots != nullptr) params.recv_dots[row] = 0.0f;
    }
    if (!params.zero_padding || params.recv_x == nullptr) continue;
    const LaneMask unused = Ballot(is_unused);
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
      if ((unused >> lane & 1) == 0) continue;
      WarpZeroWords<Word>(params.recv_x + (first + lane) * params.row_bytes, {0, params.row_words});
    }
  }
  num_used = WarpSum(num_used);
  if (LaneId() == 0 && num_used > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&ControlOf(params.device)->rows_received),
              static_cast<unsigned long long>(num_used));
  }
}

// One warp: rows of a token in the order of k; by_k as well. In rank_major its pairs share a row.
__device__ inline uint32_t FindRows(const LlDispatchKernelParams& params, const RowIndex& index,
                                    const TokenEntries& entries, ItemRows& item) {
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
__device__ inline void WriteItem(const LlDispatchKernelParams& params, const SourceMeta& meta,
                                 uint32_t source, uint32_t token, const ItemRows& item,
                                 uint32_t num_rows) {
  const GroupShape& shape = params.device.shape;
  const uint32_t top_k = shape.top_k;
  const uint64_t first_cell = static_cast<uint64_t>(token) * top_k;
  const bool is_rank_major = params.plan.layout == Layout::kRankMajor;
  const uint64_t own_row = static_cast<uint64_t>(source) * params.plan.num_tokens + token;
  if (is_rank_major && LaneId() == 0) {
    if (params.is_routed) {
      uint32_t k = 0;
      while (k < top_k && item.by_k[k] < 0) ++k;
      params.plan.out.recv_src[own_row] =
          k == top_k ? -1
                     : static_cast<int32_t>(source * shape.max_tokens * top_k + first_cell + k);
    }
    if (params.recv_dots != nullptr && num_rows == 0) params.recv_dots[own_row] = 0.0f;
    if (num_rows > 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&ControlOf(params.device)->rows_received),
                1ull);
    }
  }
  if (params.recv_weights == nullptr) return;
  for (uint32_t k = LaneId(); k < top_k; k += kWarpSize) {
    if (is_rank_major) {
      const uint64_t cell = own_row * top_k + k;
      const bool is_here =
          params.is_routed ? item.by_k[k] >= 0 : params.plan.out.recv_topk_idx[cell] >= 0;
      params.recv_weights[cell] = is_here ? meta.weights[first_cell + k] : 0.0f;
    } else if (item.by_k[k] >= 0) {
      params.recv_weights[item.by_k[k]] = meta.weights[first_cell + k];
    }
  }
}

template <typename Rows>
__device__ void PlaceItems(const LlDispatchKernelParams& params, const CallSlot& slot,
                           const TokenDeal& deal, const RowIndex& index, ItemRows& item) {
  const DeviceRank& device = params.device;
  const PushArea& area = device.layout.ll_dispatch;
  const uint64_t value = FlagValue(slot.started, params.start_operation);
  const uint32_t num_items = device.shape.num_ranks * params.plan.num_tokens;
  const uint32_t own_items =
      num_items > deal.block ? (num_items - deal.block - 1) / deal.num_blocks + 1 : 0;
  const uint32_t pieces = params.pieces.count;
  const uint32_t units_per_item = Rows::kTakesWholeRows ? 1 : pieces;
  uint64_t num_remote_words = 0;
  TokenEntries next;
  const auto load_next = [&](uint32_t unit) {
    if (unit >= own_items * units_per_item) return;
    const uint32_t ordinal = deal.block + unit / units_per_item * deal.num_blocks;
    next.Load(index, deal.SourceOf(ordinal), ordinal / device.shape.num_ranks, device.shape.top_k);
  };
  load_next(WarpId());
  for (uint32_t unit = WarpId(); unit < own_items * units_per_item; unit += kWarps) {
    const uint32_t ordinal = deal.block + unit / units_per_item * deal.num_blocks;
    const uint32_t piece = unit % units_per_item;
    const uint32_t token = ordinal / device.shape.num_ranks;
    const uint32_t source = deal.SourceOf(ordinal);
    const uint32_t num_rows = FindRows(params, index, next, item);
    load_next(unit + kWarps);
    const SourceMeta meta = MetaOf(params, slot.set, source);
    if (piece == 0) WriteItem(params, meta, source, token, item, num_rows);
    if (params.recv_x == nullptr) continue;
    const WordRange range = Rows::kTakesWholeRows ? WordRange{0, params.row_words}
                                                  : WordsOf(params.pieces, piece, params.row_words);
    if (num_rows == 0) {
      if (params.plan.layout == Layout::kRankMajor && params.zero_padding) {
        const uint64_t row = static_cast<uint64_t>(source) * params.plan.num_tokens + token;
        WarpZeroWords<typename Rows::Word>(params.recv_x + row * params.row_bytes, range);
      }
      continue;
    }
    bool is_here = true;
    if (source != device.rank || params.part == Part::kDone) {
      const uint32_t last = Rows::kTakesWholeRows ? pieces : piece + 1;
      for (uint32_t waited = piece; waited < last && is_here; ++waited) {
        is_here = WarpWait(device, PieceFlag(area, slot.set, source, token, waited), source,
                           params.operation, value);
      }
      num_remote_words += range.end - range.begin;
    }
    if (!is_here) break;
    Rows::Place(params, meta.rows + token * meta.pitch, item.rows, num_rows, range);
  }
  if (LaneId() == 0 && num_remote_words > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&ControlOf(device)->bytes_pulled),
              static_cast<unsigned long long>(num_remote_words * sizeof(typename Rows::Word)));
  }
}

template <typename Rows>
__device__ void Receive(const LlDispatchKernelParams& params, const CallSlot& slot, ItemRows* items,
                        uint32_t* word) {
  const DeviceRank& device = params.device;
  const BlockShare share{.num_blocks = gridDim.x - params.num_send_blocks,
                         .block = blockIdx.x - params.num_send_blocks};
  const TokenDeal deal{
      .num_ranks = device.shape.num_ranks, .num_blocks = share.num_blocks, .block = share.block};
  const RowIndex index(device, SequenceOf(device), params.plan.num_tokens);
  const bool is_rank_major = params.plan.layout == Layout::kRankMajor;
  using Word = typename Rows::Word;
  if (!WaitMeta(params, slot, word)) return;
  if (params.is_routed) {
    const auto ids_of = [&](uint32_t source) { return MetaOf(params, slot.set, source).ids; };
    __shared__ LlPlanTotals totals;
    const auto plan = [&](auto planner) {
      planner.Run(index, totals);
      SyncBlock();
      if (is_rank_major) return;
      FillUnused<Word>(params, share, [&](uint64_t row) { return planner.IsUsed(row); });
    };
    if (params.plan.num_histograms == 0) {
      plan(LlBatchedPlanner(device, params.plan, deal, ids_of, shared_ints));
    } else {
      plan(LlPlanner(device, params.plan, deal, ids_of, shared_ints));
    }
  } else {
    IndexRows(device, index, params.plan.num_tokens, params.plan.out.recv_src,
              static_cast<uint64_t>(params.plan.recv_rows),
              [&](uint32_t source, uint32_t token) { return deal.IsMine(source, token); });
    SyncBlock();
    if (!is_rank_major) {
      FillUnused<Word>(params, share, [&](uint64_t row) {
        RowPair pair;
        return PairOf(device.shape, params.plan.num_tokens, params.plan.out.recv_src[row], &pair);
      });
    }
  }
  PlaceItems<Rows>(params, slot, deal, index, items[WarpId()]);
}

__device__ inline void Poison(const LlDispatchKernelParams& params) {
  const GroupShape& shape = params.device.shape;
  const auto rows = static_cast<uint64_t>(params.plan.recv_rows);
  const bool is_rank_major = params.plan.layout == Layout::kRankMajor;
  const uint64_t cells = rows * (is_rank_major ? shape.top_k : 1);
  PoisonBytes(params.recv_x, rows * params.row_bytes);
  PoisonBytes(params.recv_weights, cells * sizeof(float));
  PoisonBytes(params.recv_dots, rows * sizeof(float));
  if (!params.is_routed) return;
  PoisonPlan(shape, params.plan.layout, static_cast<uint64_t>(params.plan.num_tokens) * shape.top_k,
             rows, params.plan.out);
}

}  // namespace jax_ep::gpu::ll
