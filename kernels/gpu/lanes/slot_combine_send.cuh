// The senders of a combine through slot sets (slot_combine.cu).
#pragma once

#include "kernels/gpu/device/strides.h"
#include "kernels/gpu/lanes/slot_combine.cuh"
#include "kernels/gpu/lanes/token_sums.cuh"
#include "kernels/gpu/network/slots.cuh"

namespace jax_ep::gpu::slot_combine {

template <typename T>
__device__ void SendPiece(const SlotCombineParams& params, const CallSlot& slot, uint32_t owner,
                          uint64_t token, uint32_t piece, const TokenRows<>& rows,
                          const RowList& list) {
  const DeviceRank& device = params.device;
  const WordRange range = WordsOf(params.pieces, piece, params.row_words);
  if constexpr (kHasWideWords) {
    if (params.is_tagged) {
      using PartialWord = typename T::PartialWord;
      __shared__ uint4 staged[kWarps][kMostStagedBytes / sizeof(uint4)];
      auto* sum = reinterpret_cast<PartialWord*>(staged[WarpId()]);
      SyncWarp();  // the piece before has been sent
      MakePartial<T>(params, list, rows.count, range,
                     [&](uint32_t at, const PartialWord& word) { sum[at - range.begin] = word; });
      SyncWarp();  // words of other lanes
      const TaggedPiece sent(params.pieces, piece, params.row_words, sizeof(PartialWord));
      const uint64_t row = TaggedRow(device.layout.ll_combine_tagged, slot.set, device.rank, token);
      SendTagged(reinterpret_cast<const std::byte*>(sum), sent.num_bytes(), slot.started,
                 HeapAt<uint4>(device, owner, row) + sent.first_word);
      return;
    }
  }
  auto* block = HeapAt<std::byte>(device, owner, params.area.blocks.At(slot.set, device.rank));
  if (piece == 0 && params.pair_scalars != nullptr) {
    WriteScalars(params, rows, reinterpret_cast<float*>(block) + token * device.shape.top_k);
  }
  if (params.y != nullptr) {
    WritePartial<T>(params, list, rows.count, range,
                    block + params.area.rows + token * params.area.pitch);
  }
  WarpPublish(device, owner, PieceFlag(params.area, slot.set, device.rank, token, piece),
              StartFlag(slot, params.operation));
}

// One warp: the whole partial, to a rank of another node.
template <typename T>
__device__ void SendRecord(const SlotCombineParams& params, const CallSlot& slot, uint32_t owner,
                           uint32_t token, const TokenRows<>& rows, const RowList& list) {
  const DeviceRank& device = params.device;
  const NetLayout& layout = device.network->layout;
  const uint32_t owner_node = owner / device.shape.node_size;
  const uint64_t offset = token * layout.ll_sum_pitch;
  const uint64_t send =
      layout.ll_sums_send.At(slot.set, RemoteIndex(device.shape, NodeOf(device), owner)) + offset;
  std::byte* record = OwnStage(device) + send;
  if (params.pair_scalars != nullptr) {
    WriteScalars(params, rows, reinterpret_cast<float*>(record + layout.ll_sum_scalars));
  }
  if (params.y != nullptr) {
    WritePartial<T>(params, list, rows.count, {0, params.row_words}, record);
  }
  if (LaneId() == 0) {
    *reinterpret_cast<uint64_t*>(record + layout.ll_sum_tag) = StartFlag(slot, params.operation);
  }
  if (LaneId() == 0) CountSent(device, owner);
  SyncWarp();
  const uint64_t place = layout.ll_sums_recv.At(slot.set, OwnIndexAt(device, owner));
  WarpPush(device, params.operation, owner_node, LaneId() == 0,
           {.op = Op::kWrite,
            .dst_rank = owner,
            .length_bytes = layout.ll_sum_pitch,
            .local_offset = send,
            .remote_offset = place + offset,
            .channel = Channel::kLlCombine,
            .epoch = NetSetsOf(device, params.kind).started + 1,
            .value = token});
}

template <typename T>
__device__ void Send(const SlotCombineParams& params, const CallSlot& slot, RowList& list) {
  const DeviceRank& device = params.device;
  const uint32_t num_ranks = device.shape.num_ranks;
  const uint32_t first_step = params.part == CallPart::kStart ? 0 : 1;
  const uint32_t num_owners = num_ranks - first_step;
  if (blockIdx.x == 0) {
    BlockSignalMates(device, params.area.meta_flags.At(slot.set),
                     StartFlag(slot, params.operation));
  }
  if (num_owners == 0) return;
  const uint32_t num_items = params.num_tokens * num_owners;
  const RowIndex index(device, slot.sequence, params.num_tokens);
  IndexRows(device, index, params.round, params.num_tokens, params.recv_src, params.recv_rows,
            [&](uint32_t source, uint32_t token) {
              const uint32_t step = (source + 2 * num_ranks - device.rank - first_step) % num_ranks;
              return step < num_owners &&
                     (token * num_owners + step) % params.num_send_blocks == blockIdx.x;
            });
  SyncBlock();
  const uint32_t pieces = params.pieces.count;
  const uint32_t own_items = CountStrided(blockIdx.x, params.num_send_blocks, num_items);
  for (uint32_t unit = WarpId(); unit < own_items * pieces; unit += kWarps) {
    const uint32_t item = blockIdx.x + unit / pieces * params.num_send_blocks;
    const uint64_t token = item / num_owners;
    const uint32_t owner = (device.rank + first_step + item % num_owners) % num_ranks;
    const bool is_mate = IsMate(device, owner);
    if (!is_mate && unit % pieces != 0) continue;
    const TokenRows<> rows = FindRows(params, index, owner, token, list);
    if (rows.count == 0) continue;
    if (is_mate) {
      SendPiece<T>(params, slot, owner, token, unit % pieces, rows, list);
    } else {
      SendRecord<T>(params, slot, owner, static_cast<uint32_t>(token), rows, list);
    }
  }
}

}  // namespace jax_ep::gpu::slot_combine
