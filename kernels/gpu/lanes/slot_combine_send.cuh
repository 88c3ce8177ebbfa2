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

static_assert(kWarps == kSlotWarps);

// One warp of a team: its share of a record.
template <typename T>
__device__ void WriteRecord(const SlotCombineParams& params, const CallSlot& slot,
                            std::byte* record, const TokenRows<>& rows, const RowList& list) {
  const NetLayout& layout = params.device.network->layout;
  const uint32_t member = WarpId() % kTeamWarps;
  if (params.y != nullptr) {
    const Pieces shares{.count = kTeamWarps,
                        .num_words = (params.row_words + kTeamWarps - 1) / kTeamWarps};
    WritePartial<T>(params, list, rows.count, WordsOf(shares, member, params.row_words), record);
  }
  if (member != 0) return;
  if (params.pair_scalars != nullptr) {
    WriteScalars(params, rows, reinterpret_cast<float*>(record + layout.ll_sum_scalars));
  }
  if (LaneId() == 0) {
    *reinterpret_cast<uint64_t*>(record + layout.ll_sum_tag) = StartFlag(slot, params.operation);
  }
}

// All threads of the block, whose row index is there.
template <typename T>
__device__ void SendRecords(const SlotCombineParams& params, const CallSlot& slot,
                            const RowIndex& index, RowList& list) {
  const DeviceRank& device = params.device;
  const NetLayout& layout = device.network->layout;
  const uint32_t num_remotes = NumRemotes(device);
  const uint32_t num_chunks = (params.num_tokens + kRecordTokens - 1) / kRecordTokens;
  const uint32_t member = WarpId() % kTeamWarps;
  for (uint32_t number = blockIdx.x; number < num_chunks * num_remotes;
       number += params.num_send_blocks) {
    const uint32_t owner = RemoteRank(device, number % num_remotes);
    const uint32_t first = number / num_remotes * kRecordTokens;
    const uint64_t send =
        layout.ll_sums_send.At(slot.set, RemoteIndex(device.shape, NodeOf(device), owner));
    const uint32_t token = first + WarpId() / kTeamWarps;
    if (token < params.num_tokens) {
      const TokenRows<> rows = FindRows(params, index, owner, token, list);
      std::byte* record = OwnStage(device) + send + token * layout.ll_sum_pitch;
      if (rows.count > 0) {
        WriteRecord<T>(params, slot, record, rows, list);
        if (member == 0 && LaneId() == 0) WantRecord(device, token, owner);
      }
    }
    SyncBlock();  // all of the records come before the commands that name them
    if (WarpId() != 0) continue;
    uint32_t is_last = 0;
    if (LaneId() == 0) {
      is_last = ArriveInGroup(GroupOf(device, first, owner), first, params.num_tokens) ? 1 : 0;
    }
    SyncWarp();  // what lane 0 has acquired comes before what all do
    if (FromLane(is_last, 0) == 0) continue;
    WarpPushGroup(device, params.operation, first, layout.ll_sum_pitch,
                  {.op = Op::kWrite,
                   .dst_rank = owner,
                   .local_offset = send,
                   .remote_offset = layout.ll_sums_recv.At(slot.set, OwnIndexAt(device, owner)),
                   .channel = Channel::kLlCombine,
                   .epoch = NetSetsOf(device, params.kind).started + 1});
  }
}

template <typename T>
__device__ void Send(const SlotCombineParams& params, const CallSlot& slot, RowList& list) {
  const DeviceRank& device = params.device;
  const uint32_t node_size = device.shape.node_size;
  const uint32_t own = device.rank - device.node_begin;
  const uint32_t first_step = params.part == CallPart::kStart ? 0 : 1;
  const uint32_t num_owners = node_size - first_step;  // mates
  if (blockIdx.x == 0) {
    BlockSignalMates(device, params.area.meta_flags.At(slot.set),
                     StartFlag(slot, params.operation));
  }
  if (num_owners == 0 && device.network == nullptr) return;
  const uint32_t num_items = params.num_tokens * num_owners;
  const RowIndex index(device, slot.sequence, params.num_tokens);
  if (device.network == nullptr) {  // else a kernel has done so (network/slots.cu)
    IndexRows(device, index, params.round, params.num_tokens, params.recv_src, params.recv_rows,
              [&](uint32_t source, uint32_t token) {
                const uint32_t local = source - device.node_begin;
                const uint32_t step = (local + 2 * node_size - own - first_step) % node_size;
                return step < num_owners &&
                       (token * num_owners + step) % params.num_send_blocks == blockIdx.x;
              });
    SyncBlock();
  }
  // Other nodes first: theirs is the longer way.
  if (device.network != nullptr) SendRecords<T>(params, slot, index, list);
  const uint32_t pieces = params.pieces.count;
  const uint32_t own_items = CountStrided(blockIdx.x, params.num_send_blocks, num_items);
  for (uint32_t unit = WarpId(); unit < own_items * pieces; unit += kWarps) {
    const uint32_t item = blockIdx.x + unit / pieces * params.num_send_blocks;
    const uint64_t token = item / num_owners;
    const uint32_t owner = device.node_begin + (own + first_step + item % num_owners) % node_size;
    const TokenRows<> rows = FindRows(params, index, owner, token, list);
    if (rows.count > 0) SendPiece<T>(params, slot, owner, token, unit % pieces, rows, list);
  }
}

}  // namespace jax_ep::gpu::slot_combine
