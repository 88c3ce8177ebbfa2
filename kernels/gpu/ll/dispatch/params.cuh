// kernels/gpu/ll/dispatch: rows to the ranks of their experts, for few tokens, in one kernel.
//   In: x, weights, topk_idx or a plan. Out: rows in the slots of peers, from there to recv_x.
//   Waits: receivers for ids and row flags; senders for the readers of the set's previous use.
//
// What the parts of an LL dispatch share: parameters, and copies by one warp.
#pragma once

#include "kernels/gpu/device/record_format.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/ll/plan/params.cuh"
#include "kernels/gpu/network/launchers.h"
#include "kernels/gpu/protocol/push.cuh"

namespace jax_ep::gpu::ll {

inline constexpr uint32_t kThreads = 512;
inline constexpr uint32_t kWarps = kThreads / kWarpSize;
inline constexpr SetKind kKind = SetKind::kLlDispatch;

struct LlDispatchKernelParams {
  DeviceRank device;
  CallPart part;
  bool is_routed;  // it makes the plan
  bool has_rows;
  bool has_weights;
  bool zero_padding;
  bool is_tagged;         // rows travel in tagged words
  bool has_totals_block;  // the first receiving block adds up the plan's totals and places nothing
  Operation operation;    // this kernel's
  Operation start_operation;  // the one whose flags are waited for
  uint32_t num_send_blocks;
  uint32_t num_take_blocks;  // of a done, before those that receive
  RecordsToTake taken;       // by these
  uint32_t num_bulk_warps;   // of a block that send rows with bulk copies; 0: lanes store them
  uint32_t num_place_warps;  // of a block that place rows with bulk copies; 0: likewise
  uint32_t place_offset;     // of their room, behind the plan's shared memory
  Pieces pieces;
  uint32_t row_words;
  uint64_t row_bytes;          // of recv_x
  uint64_t x_bytes;            // of a row of x
  uint64_t wire_bytes;         // of a row that is sent
  uint64_t slot_bytes;         // of shared memory, for what a warp sends in bulk at a time
  const std::byte* x;          // [T, H] or null
  const int32_t* topk_idx;     // [T * K], routed
  const float* weights;        // [T * K] or null
  const int32_t* given_slots;  // [T * K], planned
  uint32_t rank_ids;           // of those, or of topk_idx, so many are of one rank
  LlRound round;
  LlPlanParams plan;         // T of the round; outputs, of which a planned call reads two
  std::byte* recv_x;         // [R, H] or null
  float* recv_weights;       // [R]; rank_major [N * T * K]; or null
  const std::byte* y;        // [R, H] or null
  const float* row_weights;  // [R] or null
  float* recv_dots;          // [R] or null
  RecordFormat format;       // rows that travel as records: words are units then
  ScalesPlace scales;        // likewise
  const int32_t* epoch_in;   // done
  int32_t* epoch_out;        // start
};

extern __shared__ __align__(128) int32_t shared_ints[];

// Row of rank_major of a token of the round.
__device__ inline uint64_t RankMajorRow(const LlDispatchKernelParams& params, uint32_t source,
                                        uint32_t token) {
  return static_cast<uint64_t>(source) * params.round.call_tokens + params.round.first_token +
         token;
}

// What this rank says of its part `operation` of the call; program: its fingerprint.
__host__ __device__ inline PushHeader HeaderOf(const LlDispatchKernelParams& params,
                                               Operation operation, uint32_t program) {
  return {{static_cast<int32_t>(params.plan.num_tokens), params.plan.recv_rows,
           static_cast<int32_t>(params.plan.layout), params.is_routed ? 1 : 0,
           static_cast<int32_t>(CallWord(operation, program))}};
}

// Words of a range that a warp has in hand, kCount of each lane.
template <typename Word>
class LaneWords {
 public:
  static constexpr uint32_t kCount = 8;
  static constexpr uint32_t kStep = kCount * kWarpSize;  // words of the warp

  // Of the words from `first` on, those below `end`.
  __device__ void Load(const std::byte* from, uint32_t first, uint32_t end) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      const uint32_t word = first + i * kWarpSize + LaneId();
      if (word < end) words_[i] = reinterpret_cast<const Word*>(from)[word];
    }
  }
  __device__ void Store(std::byte* to, uint32_t first, uint32_t end) const {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      const uint32_t word = first + i * kWarpSize + LaneId();
      if (word < end) reinterpret_cast<Word*>(to)[word] = words_[i];
    }
  }

 private:
  Word words_[kCount];
};

template <typename Word>
__device__ inline void WarpZeroWords(std::byte* row, WordRange range) {
  for (uint32_t i = range.begin + LaneId(); i < range.end; i += kWarpSize) {
    reinterpret_cast<Word*>(row)[i] = Word{};
  }
}

}  // namespace jax_ep::gpu::ll
