// kernels/gpu/lanes: the same operations without bulk copies (sm_80, AMD, rows of odd size).
//   In and out: as in ht/combine, ll/dispatch and ll/combine.
//   Waits: as there. The flags are the same, so ranks may differ in which of the two they run.
//
// What the parts of a combine through slot sets share: parameters, types, sums of local rows.
#pragma once

#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/network/slots.cuh"
#include "kernels/gpu/protocol/push.cuh"
#include "kernels/gpu/sums/rank_tree.cuh"
#include "kernels/gpu/sums/token_rows.cuh"

namespace jax_ep::gpu::slot_combine {

inline constexpr uint32_t kThreads = 512;
inline constexpr uint32_t kWarps = kThreads / kWarpSize;

struct SlotCombineParams {
  DeviceRank device;
  PushArea area;  // of the device's layout, by mode
  SetKind kind;
  CallPart part;
  Layout layout;
  Operation operation;        // this kernel's
  Operation start_operation;  // the one whose flags are waited for
  uint32_t num_send_blocks;
  uint32_t num_tokens;
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

// Weighted sum of the local rows, words word + i * kWarpSize < end for i < kWords. The next row is
// on its way while one is added.
template <typename Elem, typename Word, uint32_t kWords, uint32_t kElems>
__device__ inline void SumTokenRows(const SlotCombineParams& params, const TokenRows& local,
                                    uint32_t count, uint32_t word, uint32_t end,
                                    float (&sums)[kWords][kElems]) {
  Word next[kWords];
  const auto load = [&](uint32_t i) {
    const auto* row = reinterpret_cast<const Word*>(
        params.y + static_cast<uint64_t>(local.rows[i]) * params.row_bytes);
#pragma unroll
    for (uint32_t j = 0; j < kWords; ++j) {
      if (word + j * kWarpSize < end) next[j] = row[word + j * kWarpSize];
    }
  };
  load(0);
  for (uint32_t i = 0; i < count; ++i) {
    Word words[kWords];
#pragma unroll
    for (uint32_t j = 0; j < kWords; ++j) words[j] = next[j];
    if (i + 1 < count) load(i + 1);
    AddRow<Elem>(words, local.weights[i], i == 0, sums);
  }
}

// f32 partials of a word of 16-bit elements.
struct alignas(16) TwoWords {
  uint4 words[2];
};

// kLevels: of the tree over ranks.
template <typename E, typename P, bool kVectorised, uint32_t kLevelsOfTree>
struct Types {
  using Elem = E;
  using Partial = P;
  using Word = typename WordOf<E, kVectorised>::Type;
  using Storage = typename P::Storage;
  static constexpr uint32_t kElems = WordOf<E, kVectorised>::kElems;
  // The partial of a word.
  using PartialWord = std::conditional_t<sizeof(Storage) * kElems == sizeof(Word), Word,
                                         std::conditional_t<kElems == 1, Storage, TwoWords>>;
  static constexpr uint32_t kLevels = kLevelsOfTree;
  static constexpr uint32_t kSendWords = 4;  // in flight per lane
  static constexpr uint32_t kAddWords = sizeof(Storage) == 2 && kLevels <= 3 ? 2 : 1;
};

// All threads of every block, as the last thing of the operation `sequence`; `shared_flag` is
// shared.
__device__ inline void FinishSlotCombine(const SlotCombineParams& params, uint64_t sequence,
                                         const CallSlot& slot, uint32_t* shared_flag) {
  const DeviceRank& device = params.device;
  if (!LastToArrive(device, shared_flag)) return;
  const bool is_start = params.part == CallPart::kStart;
  if (HasFailed(device)) {
    if (!is_start) {
      PoisonBytes(params.out, params.num_tokens * params.row_bytes);
      PoisonBytes(params.pair_scalars_out,
                  static_cast<uint64_t>(params.num_tokens) * device.shape.top_k * sizeof(float));
    }
  } else if (params.part == CallPart::kDone) {
    SignalConsumed(device, params.kind, sequence);
  } else if (device.network != nullptr && slot.is_ok != 0) {
    FinishSending(device, params.kind, params.operation, slot, /*num_more=*/0);
  }
  if (threadIdx.x != 0) return;
  if (params.epoch_out != nullptr) *params.epoch_out = EpochOf(slot.started);
  if (!is_start) CountUp(&ControlOf(device)->combines, 1);
  UpdateSet(device, params.kind, params.part, slot, sequence);
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
