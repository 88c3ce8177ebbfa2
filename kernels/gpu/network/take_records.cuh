// What a done takes in of what other nodes have sent to slot sets (mode ll): it waits for the
// counts of their ranks, copies what has come to where node-mates push, but for records that it
// reads in the GPU's own stage, and sets the same flags.
//
// The first blocks of the done do that, the others wait for those flags. Of many ranks it is a
// kernel in front of the done (PrepareToTake): its blocks need less of an SM, and one that
// waits in vain keeps no other from its rank.
#pragma once

#include "kernels/gpu/network/send.cuh"
#include "kernels/gpu/network/slots.cuh"
#include "kernels/gpu/protocol/push.cuh"
#include "kernels/gpu/protocol/tagged_words.cuh"

namespace jax_ep::gpu {

// What a record of a kind has, and where it goes.
struct RecordFacts {
  PushArea area;
  uint64_t tag, row_bytes;
};
__device__ inline RecordFacts FactsOf(const DeviceRank& device, SetKind kind) {
  const NetLayout& layout = device.network->layout;
  const GroupShape& shape = device.shape;
  if (kind == SetKind::kLlDispatch) {
    return {device.layout.ll_dispatch, layout.ll_row_tag,
            shape.hidden * ElemBytes(shape.elem_type)};
  }
  const ElemType partial = shape.f32_partials ? ElemType::kF32 : shape.elem_type;
  return {device.layout.ll_combine, layout.ll_sum_tag, shape.hidden * ElemBytes(partial)};
}

// All threads of the block: the head of a dispatch, each of its words with a tag.
__device__ inline void TakeHead(const DeviceRank& device, const RecordsToTake& taken,
                                const CallSlot& slot, const std::byte* head, std::byte* block) {
  const NetLayout& layout = device.network->layout;
  const uint32_t num_warps = blockDim.x / kWarpSize;
  const auto tag = [&](uint64_t to, uint64_t at, uint32_t count) {  // a share by each warp
    const uint32_t share = (count + num_warps - 1) / num_warps;
    const uint32_t first = WarpId() * share;
    if (first >= count) return;
    WarpTag(reinterpret_cast<uint64_t*>(block + to) + first, head + at + first * sizeof(uint32_t),
            first + share < count ? share : count - first, slot.started);
  };
  const uint32_t cells = taken.num_tokens * device.shape.top_k;
  tag(0, 0, PushHeader::kNumWords);
  if (taken.has_ids) tag(device.layout.push_ids, layout.ll_ids, cells);
  if (taken.has_weights) tag(device.layout.push_weights, layout.ll_weights, cells);
}

// All threads of the block: its part of what `source` has sent.
__device__ inline void TakeFrom(const DeviceRank& device, const RecordsToTake& taken,
                                const CallSlot& slot, uint32_t source, uint32_t part) {
  const NetLayout& layout = device.network->layout;
  const RecordFacts facts = FactsOf(device, taken.kind);
  const SentRecords records = RecordsOf(device, taken.kind, slot.set, source);
  const bool is_dispatch = taken.kind == SetKind::kLlDispatch;
  const uint64_t value = StartFlag(slot, taken.start_operation);
  auto* block = OwnHeapAt<std::byte>(device, facts.area.blocks.At(slot.set, source));
  if (part == 0 && is_dispatch) {
    TakeHead(device, taken, slot, records.begin - layout.ll_head_bytes, block);
  } else if (part == 0 && threadIdx.x == 0) {
    StoreReleaseSys(OwnHeapAt<uint64_t>(device, facts.area.meta_flags.At(slot.set, source)), value);
  }
  // Relaxed: the count came after it.
  const auto has_come = [&](uint32_t token) {
    const std::byte* at = records.Of(token) + facts.tag;
    const uint64_t tag = *reinterpret_cast<const volatile uint64_t*>(at);
    if (tag != value && tag >> kCallBits == value >> kCallBits) {
      Fail(device, FailureKind::kWrongOrder, taken.operation, source, value, tag);
    }
    return tag == value;
  };
  const auto flag_of = [&](uint32_t token, uint32_t piece) {
    return OwnHeapAt<uint64_t>(device, PieceFlag(facts.area, slot.set, source, token, piece));
  };
  if (AreReadInStage(device, source)) {  // a thread for each
    for (uint32_t token = part * blockDim.x + threadIdx.x; token < taken.num_records();
         token += taken.num_parts * blockDim.x) {
      if (!has_come(token)) continue;
      FenceSys();  // what the block has acquired comes before the flags
      for (uint32_t piece = 0; piece < taken.num_pieces; ++piece) {
        StoreRelaxedSys(flag_of(token, piece), value);
      }
    }
    return;
  }
  const uint32_t num_warps = blockDim.x / kWarpSize;
  const uint64_t scalars_bytes = device.shape.top_k * sizeof(float);
  for (uint32_t token = part * num_warps + WarpId(); token < taken.num_records();
       token += taken.num_parts * num_warps) {
    if (!has_come(token)) continue;
    const std::byte* record = records.Of(token);
    if (taken.has_rows) {
      WarpCopyBytes(block + facts.area.rows + token * facts.area.pitch, record, facts.row_bytes);
    }
    if (!is_dispatch) {
      WarpCopyBytes(block + token * scalars_bytes, record + layout.ll_sum_scalars, scalars_bytes);
    }
    SyncWarp();
    for (uint32_t piece = LaneId(); piece < taken.num_pieces; piece += kWarpSize) {
      StoreReleaseSys(flag_of(token, piece), value);
    }
  }
}

// All threads of the block `number` of those that take (num_blocks); `shared_flag` is shared. Not
// inline: kernels of one node have it and never call it.
__device__ __noinline__ inline void BlockTakeRecords(const DeviceRank& device,
                                                     const RecordsToTake& taken,
                                                     const CallSlot& slot, uint32_t number,
                                                     uint32_t* shared_flag) {
  const uint32_t num_remotes = NumRemotes(device);
  const uint32_t source = RemoteRank(device, number % num_remotes);
  if (threadIdx.x == 0) {
    const uint64_t epoch = NetSetsOf(device, taken.kind).sets[slot.set].epoch;
    *shared_flag = WaitSignals(device, LocalRankOf(device), ChannelsOf(taken.kind).records, source,
                               taken.operation, epoch)
                       ? 1
                       : 0;
  }
  if (number == 0 && WarpId() == 1) NoteReads(device, taken.kind);
  SyncBlock();
  if (*shared_flag != 0) TakeFrom(device, taken, slot, source, number / num_remotes);
}

}  // namespace jax_ep::gpu
