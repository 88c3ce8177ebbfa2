// What the parts of a combine through slot sets share: parameters, and the end of the operation.
#pragma once

#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/network/launchers.h"
#include "kernels/gpu/network/slots.cuh"
#include "kernels/gpu/protocol/open_end.cuh"
#include "kernels/gpu/protocol/push.cuh"
#include "kernels/gpu/protocol/tagged_partials.cuh"
#include "kernels/gpu/protocol/tagged_rows.cuh"

namespace jax_ep::gpu::slot_combine {

inline constexpr uint32_t kThreads = 512;
inline constexpr uint32_t kWarps = kThreads / kWarpSize;
// Ranks of a group, at most, whose partials travel in tagged words.
inline constexpr uint32_t kMostTaggedPartials = 8;
// Of a piece of such a partial.
inline constexpr uint32_t kMostStagedBytes = 2048;

struct SlotCombineParams {
  DeviceRank device;
  PushArea area;  // of the device's layout
  SetKind kind;
  CallPart part;
  bool is_tagged;  // partials travel in tagged words
  Layout layout;
  Operation operation;        // this kernel's
  Operation start_operation;  // the one whose flags are waited for
  uint32_t num_send_blocks;
  uint32_t num_take_blocks;  // of a done, before those that add
  RecordsToTake taken;       // by these
  uint32_t num_tokens;       // of the round
  LlRound round;
  uint32_t rank_rows;  // slots of one rank in send_slot
  Pieces pieces;
  uint32_t row_words;
  uint64_t row_bytes;
  uint64_t recv_rows;
  const std::byte* y;         // [R, H] or null
  const float* row_weights;   // [R] or null
  const float* pair_scalars;  // [R], rank_major [R * K], or null
  const int32_t* recv_src;    // [R]
  const int32_t* send_slot;   // [T * K]
  std::byte* out;             // [T, H] or null
  float* pair_scalars_out;    // [T * K] or null
  const int32_t* epoch_in;    // done
  int32_t* epoch_out;         // start
};

// Partials of tokens of this rank in a set.
struct SlotPartials {
  const SlotCombineParams& call;
  uint32_t set;

  __device__ const std::byte* PartialOf(uint32_t rank, uint64_t token) const {
    const PushArea& area = call.area;
    return OwnHeapAt<std::byte>(call.device, area.blocks.At(set, rank) + area.rows) +
           token * area.pitch;
  }
  __device__ const float* ScalarsOf(uint32_t rank, uint64_t token) const {
    return OwnHeapAt<float>(call.device, call.area.blocks.At(set, rank)) +
           token * call.device.shape.top_k;
  }
  // One warp: until a piece of a token is here from all ranks that is_from(peer) says, by all
  // lanes.
  template <typename IsFrom>
  __device__ bool Wait(IsFrom&& is_from, uint64_t token, uint32_t piece, uint64_t value) const {
    const DeviceRank& device = call.device;
    bool is_ok = true;
    for (uint32_t first = 0; first < device.shape.num_ranks; first += kWarpSize) {
      const uint32_t peer = first + LaneId();
      if (!is_from(peer) || peer >= device.shape.num_ranks) continue;
      const uint64_t flag = PieceFlag(call.area, set, peer, token, piece);
      is_ok &=
          WaitExactFlag(device, OwnHeapAt<uint64_t>(device, flag), peer, call.operation, value);
    }
    return AllHaveWaited(is_ok);
  }
  // A piece of a partial that travels in tagged words, where it arrives.
  __device__ WideSource TaggedOf(uint32_t rank, uint64_t token, const TaggedPiece& piece,
                                 uint64_t sequence) const {
    const DeviceRank& device = call.device;
    const uint64_t row = TaggedRow(device.layout.ll_combine_tagged, set, rank, token);
    return {.device = device,
            .words = OwnHeapAt<uint4>(device, row) + piece.first_word,
            .sequence = sequence,
            .peer = rank,
            .operation = call.operation};
  }
};

// All threads of one block: the outputs of the call, not of this round alone.
__device__ inline void Poison(const SlotCombineParams& params) {
  const LlRound& round = params.round;
  const uint64_t top_k = params.device.shape.top_k;
  if (params.out != nullptr) {
    PoisonBytes(params.out - round.first_token * params.row_bytes,
                round.call_tokens * params.row_bytes);
  }
  if (params.pair_scalars_out != nullptr) {
    PoisonBytes(params.pair_scalars_out - round.first_token * top_k,
                round.call_tokens * top_k * sizeof(float));
  }
}

// All threads of every block, as the last thing of the operation `sequence`; `shared_flag` is
// shared. kHasNetwork: the group may have other nodes; kernels without them are shorter.
template <bool kHasNetwork>
__device__ inline void FinishSlotCombine(const SlotCombineParams& params, uint64_t sequence,
                                         const CallSlot& slot, const OpenEnd& end,
                                         uint32_t* shared_flag) {
  const DeviceRank& device = params.device;
  const bool is_start = params.part == CallPart::kStart;
  const auto write = [&] {
    if (params.epoch_out != nullptr) *params.epoch_out = EpochOf(params.device, slot.started);
    if (!is_start && params.round.first_token == 0) CountUp(&ControlOf(device)->combines, 1);
    UpdateSet(device, params.kind, params.part, slot, sequence);
  };
  if (HasOpenEnd(device, params.part)) {
    return end.Finish(sequence, write, [&] { Poison(params); });
  }
  if (!LastToArrive(device, shared_flag)) return;
  if constexpr (kHasNetwork) {
    const bool is_part = device.network != nullptr && slot.is_ok != 0;
    const bool has_failed = SyncBlockAny(threadIdx.x == 0 && HasFailed(device));
    if (is_part && !has_failed && is_start) {
      FinishSending(device, params.kind, params.operation, slot, /*num_more=*/0);
    } else if (is_part && !has_failed && params.part == CallPart::kDone) {
      NoteRead(device, params.kind, params.operation, slot.set);
    }
  }
  if (HasFailed(device)) {
    if (!is_start) Poison(params);
  } else if (params.part == CallPart::kDone) {
    SignalConsumed(device, params.kind, sequence);
  }
  if (threadIdx.x != 0) return;
  write();
  EndOperation(device, sequence);
}

}  // namespace jax_ep::gpu::slot_combine

namespace jax_ep::gpu {

// Calls of mode ll on one node that move rows of 16-byte words, with bulk copies. False: this
// device has none, or its shared memory does not suffice, so lanes must do it.
bool LaunchLlCombine(const RankHandle& rank, const slot_combine::SlotCombineParams& call,
                     cudaStream_t stream, const char** error);
const char* PrepareLlCombineKernels(const RankHandle& rank);

}  // namespace jax_ep::gpu
