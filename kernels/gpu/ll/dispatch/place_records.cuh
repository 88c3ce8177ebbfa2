// Placing the rows of an LL dispatch that travel quantised with bulk copies: a record comes into
// shared memory, and what becomes of it leaves from there. This rank's own rows are quantised where
// they are placed.
#pragma once

#include "kernels/gpu/device/deliver_records.cuh"
#include "kernels/gpu/lanes/ll_send_records.cuh"
#include "kernels/gpu/ll/dispatch/place.cuh"
#include "kernels/gpu/ll/dispatch/send_records.cuh"

namespace jax_ep::gpu::ll {

// Shared memory of a warp: a record, and a row of elements.
template <typename Rows>
__host__ __device__ constexpr uint32_t PlaceRecordBytes(uint64_t wire_bytes, uint64_t row_bytes) {
  return static_cast<uint32_t>(wire_bytes + (Rows::kAreSplit ? 0 : row_bytes));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// One warp. The row of a token, from a record in shared memory or from elements.
template <typename Rows, typename Source>
__device__ inline void PlaceUnits(const LlDispatchKernelParams& params, std::byte* record,
                                  Source&& source, bool is_record, const PlacedRows& item,
                                  uint32_t num_rows) {
  const RecordFormat& format = params.format;
  std::byte* row = Rows::kAreSplit ? record : record + params.wire_bytes;
  if (!Rows::kAreSplit || !is_record) {
    ForUnits(source, 0, format.num_units, [&](uint32_t unit, const Unit& in_hand) {
      if constexpr (Rows::kAreSplit) {
        StoreInRecord(format, row, unit, in_hand);
      } else {
        DequantizedUnit<typename Rows::Elem>(format, in_hand).StoreInRow(row, unit);
      }
    });
    FenceProxyAsyncShared();  // each lane's stores, before bulk stores read them
    SyncWarp();
  }
  if (LaneId() == 0) {
    for (uint32_t copy = 0; copy < num_rows; ++copy) {
      BulkStore(params.recv_x + static_cast<uint64_t>(item.rows[copy]) * params.row_bytes, row,
                static_cast<uint32_t>(params.row_bytes));
    }
    BulkCommit();
  }
  if constexpr (Rows::kAreSplit) {
    for (uint32_t copy = 0; copy < num_rows; ++copy) {
      StoreScales(format, params.scales, record, static_cast<uint64_t>(item.rows[copy]));
    }
  }
}

// All threads of the block.
template <typename Rows>
__device__ inline void PlaceRecordsInBulk(const LlDispatchKernelParams& params,
                                          const CallSlot& slot, const SourceWords& words,
                                          const TokenPartition& partition, const RowIndex& index,
                                          PlacedRows& item) {
  __shared__ uint64_t barriers[kWarps];
  const DeviceRank& device = params.device;
  const uint32_t warp = WarpId();
  if (warp >= params.num_place_warps) return;
  std::byte* record = reinterpret_cast<std::byte*>(shared_ints) + params.place_offset +
                      warp * PlaceRecordBytes<Rows>(params.wire_bytes, params.row_bytes);
  uint64_t* barrier = barriers + warp;
  if (LaneId() == 0) {
    BarrierInit(barrier, 1);
    FenceBarrierInit();
  }
  SyncWarp();
  const auto wire_bytes = static_cast<uint32_t>(params.wire_bytes);
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
      ZeroUnusedRow<typename Rows::Word>(params, source, token, {0, params.row_words});
      continue;
    }
    if (!WaitPieces(params, slot, source, token, 0, params.pieces.count)) break;
    const SourceWords::Rows rows = words.RowsOf(source);
    const std::byte* from = rows.begin + token * rows.pitch;
    const bool is_pushed = IsPushed(params, source);
    if (LaneId() == 0) BulkWaitRead<0>();  // the row before has left its place
    SyncWarp();
    if (is_pushed) {
      ++num_remote;
      if (LaneId() == 0) {
        FenceProxyAsync();  // what the flags have announced, before a bulk load
        BarrierExpectBytes(barrier, wire_bytes);
        BulkLoad(record, from, wire_bytes, barrier);
      }
      BarrierWait(barrier, parity);
      parity ^= 1;
      PlaceUnits<Rows>(params, record, RecordUnits(params.format, record), true, item, num_rows);
    } else {
      PlaceUnits<Rows>(params, record, ElementUnits<typename Rows::Elem>(params.format, from),
                       false, item, num_rows);
    }
  }
  if (LaneId() != 0) return;
  BulkWaitAll();
  if (num_remote > 0) CountUp(&ControlOf(device)->bytes_pulled, num_remote * params.wire_bytes);
}
#endif

// How the kernel handles such rows. A word is what becomes of a unit in recv_x.
template <typename Delivered>
struct RecordRows : Delivered {
  using typename Delivered::Elem;
  struct Word {
    uint4 words[Delivered::kAreSplit ? 1 : DequantizedUnit<Elem>::kWords];
  };
  static constexpr bool kTakesWholeRows = false;
  static constexpr bool kFitBulkCopies = true;
  static constexpr uint32_t kWireBytes = sizeof(uint4);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Sender = RecordSender<Elem>;

  __device__ static void PlaceInBulk(const LlDispatchKernelParams& params, const CallSlot& slot,
                                     const SourceWords& words, const TokenPartition& partition,
                                     const RowIndex& index, PlacedRows& item) {
    PlaceRecordsInBulk<RecordRows>(params, slot, words, partition, index, item);
  }
#endif

  __device__ static void Send(const LlDispatchKernelParams& params, const CallSlot& slot) {
    SendRecords<Elem>(params, slot);
  }
  __device__ static void Place(const LlDispatchKernelParams& params, const std::byte* from,
                               bool is_pushed, const int32_t* rows, uint32_t num_rows,
                               WordRange range) {
    const auto place = [&](uint32_t unit, const Unit& in_hand) {
      Delivered::Store(params.format, params.recv_x, params.scales, rows, num_rows, unit, in_hand);
    };
    if (is_pushed) {
      ForUnits(RecordUnits(params.format, from), range.begin, range.end, place);
    } else {
      ForUnits(ElementUnits<Elem>(params.format, from), range.begin, range.end, place);
    }
  }
};

}  // namespace jax_ep::gpu::ll
