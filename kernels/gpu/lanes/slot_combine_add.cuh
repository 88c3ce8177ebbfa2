// The adders of a combine through slot sets (slot_combine.cu).
#pragma once

#include "kernels/gpu/device/strides.h"
#include "kernels/gpu/lanes/slot_combine.cuh"
#include "kernels/gpu/lanes/token_sums.cuh"

namespace jax_ep::gpu::slot_combine {

// Those of other nodes may be in this rank's stage.
struct SentPartials : SlotPartials {
  __device__ const std::byte* PartialOf(uint32_t rank, uint64_t token) const {
    if (AreReadInStage(call.device, rank)) return RecordOf(rank, token);
    return SlotPartials::PartialOf(rank, token);
  }
  __device__ const float* ScalarsOf(uint32_t rank, uint64_t token) const {
    if (!AreReadInStage(call.device, rank)) return SlotPartials::ScalarsOf(rank, token);
    const uint64_t scalars = call.device.network->layout.ll_sum_scalars;
    return reinterpret_cast<const float*>(RecordOf(rank, token) + scalars);
  }

 private:
  __device__ const std::byte* RecordOf(uint32_t rank, uint64_t token) const {
    return RecordsOf(call.device, call.kind, set, rank).Of(token);
  }
};

// One warp: a piece of partials of a token that come in tagged words, to where they are without.
__device__ inline bool UntagPartials(const SlotPartials& partials, const OwnToken& token,
                                     const CallSlot& slot, const TaggedPiece& piece) {
  bool is_ok = true;
  for (uint32_t rank = 0; rank < partials.call.device.shape.num_ranks; ++rank) {
    if (!token.partials.Has(rank) || rank == token.own) continue;
    const WideSource source = partials.TaggedOf(rank, token.token, piece, slot.started);
    auto* to = reinterpret_cast<uint4*>(
        const_cast<std::byte*>(partials.PartialOf(rank, token.token)) + piece.begin);
    for (uint32_t unit = LaneId(); unit < piece.num_units() && is_ok; unit += kWarpSize) {
      uint4 units[1];
      is_ok = source.Load(unit, 1, piece.num_units(), units);
      if (is_ok) to[unit] = units[0];
    }
  }
  return AllHaveWaited(is_ok);
}

template <typename T>
__device__ void Receive(const SlotCombineParams& params, const CallSlot& slot, RowList& list,
                        uint32_t* shared_flag) {
  const DeviceRank& device = params.device;
  const uint32_t num_before = params.num_send_blocks + params.num_take_blocks;
  const uint32_t num_blocks = gridDim.x - num_before;
  const uint32_t block = blockIdx.x - num_before;
  const bool is_whole = params.part == CallPart::kWhole;
  const RowIndex index(device, slot.sequence, params.num_tokens);
  if (is_whole) {
    IndexRows(device, index, params.round, params.num_tokens, params.recv_src, params.recv_rows,
              [&](uint32_t source, uint32_t token) {
                return source == device.rank && token % num_blocks == block;
              });
  }
  const uint64_t value = StartFlag(slot, params.start_operation);
  if (!BlockWaitPeers(device, params.area.meta_flags.At(slot.set), params.operation, value,
                      shared_flag)) {
    return;
  }
  const SentPartials partials{{params, slot.set}};
  const uint32_t pieces = params.pieces.count;
  const uint32_t own_tokens = CountStrided(block, num_blocks, params.num_tokens);
  for (uint32_t unit = WarpId(); unit < own_tokens * pieces; unit += kWarps) {
    const uint32_t piece = unit % pieces;
    const uint64_t number = block + static_cast<uint64_t>(unit / pieces) * num_blocks;
    TokenRows<> rows;
    if (is_whole) rows = FindRows(params, index, device.rank, number, list);
    const OwnToken token(params, number, is_whole ? device.rank : OwnToken::kNobody, rows,
                         [](uint32_t holder) { return holder; });
    const auto is_from = [&](uint32_t peer) {
      return token.partials.Has(peer) && peer != token.own;
    };
    const bool is_here =
        params.is_tagged ? UntagPartials(partials, token, slot,
                                         {params.pieces, piece, params.row_words,
                                          static_cast<uint32_t>(sizeof(typename T::PartialWord))})
                         : partials.Wait(is_from, number, piece, value);
    if (!is_here) break;
    if (piece == 0 && params.pair_scalars_out != nullptr) {
      WriteOwnScalars(params, token,
                      [&](uint32_t holder) { return partials.ScalarsOf(holder, number); });
    }
    if (params.out == nullptr) continue;
    WriteOwnSum<T>(params, RankLeaves(device.shape), token, list,
                   WordsOf(params.pieces, piece, params.row_words),
                   [&](uint32_t rank) { return partials.PartialOf(rank, number); });
  }
}

}  // namespace jax_ep::gpu::slot_combine
