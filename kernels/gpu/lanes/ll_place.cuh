// Placing the rows of an LL dispatch by the lanes of a warp.
#pragma once

#include "kernels/gpu/ll/dispatch/place.cuh"
#include "kernels/gpu/protocol/tagged_rows.cuh"

namespace jax_ep::gpu::ll {

template <typename Rows>
__device__ void PlaceItems(const LlDispatchKernelParams& params, const CallSlot& slot,
                           const SourceWords& words, const TokenPartition& partition,
                           const RowIndex& index, PlacedRows& item) {
  const DeviceRank& device = params.device;
  const uint32_t num_items = device.shape.num_ranks * params.plan.num_tokens;
  const uint32_t own_items = partition.ItemsOf(num_items);
  const uint32_t pieces = params.pieces.count;
  const uint32_t units_per_item = Rows::kTakesWholeRows ? 1 : pieces;
  uint64_t num_remote_words = 0;
  TokenFacts next;
  const auto load_next = [&](uint32_t unit) {
    if (unit >= own_items * units_per_item) return;
    const auto [source, token] = partition.ItemAt(unit / units_per_item);
    next.Load(params, words, index, source, token);
  };
  load_next(WarpId());
  for (uint32_t unit = WarpId(); unit < own_items * units_per_item; unit += kWarps) {
    const auto [source, token] = partition.ItemAt(unit / units_per_item);
    const uint32_t piece = unit % units_per_item;
    const TokenFacts facts = next;
    load_next(unit + kWarps);
    const uint32_t num_rows = FindPlacedRows(params, index, facts.entries, item);
    if (piece == 0) WriteItem(params, words, source, token, facts, item, num_rows);
    if (params.recv_x == nullptr) continue;
    const WordRange range = Rows::kTakesWholeRows ? WordRange{0, params.row_words}
                                                  : WordsOf(params.pieces, piece, params.row_words);
    if (num_rows == 0) {
      ZeroUnusedRow<typename Rows::Word>(params, source, token, range);
      continue;
    }
    if constexpr (Rows::kFitTaggedWords) {
      if (params.is_tagged && IsPushed(params, source)) {
        const TaggedSource row{
            .device = device,
            .words = OwnHeapAt<uint64_t>(
                device, TaggedRow(device.layout.ll_dispatch_tagged, slot.set, source, token)),
            .sequence = slot.started,
            .peer = source,
            .operation = params.operation};
        if (!Rows::PlaceTagged(params, row, item.rows, num_rows, range)) break;
        num_remote_words += range.end - range.begin;
        continue;
      }
    }
    if (!WaitPieces(params, slot, source, token, piece,
                    Rows::kTakesWholeRows ? pieces : piece + 1)) {
      break;
    }
    if (IsPushed(params, source)) num_remote_words += range.end - range.begin;
    const SourceWords::Rows rows = words.RowsOf(source);
    Rows::Place(params, rows.begin + token * rows.pitch, IsPushed(params, source), item.rows,
                num_rows, range);
  }
  if (LaneId() == 0 && num_remote_words > 0) {
    CountUp(&ControlOf(device)->bytes_pulled, num_remote_words * Rows::kWireBytes);
  }
}

}  // namespace jax_ep::gpu::ll
