// What the parts of an LL dispatch share: parameters, and copies by one warp.
#pragma once

#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/ll_batched_plan.cuh"
#include "kernels/gpu/ll_plan.cuh"
#include "kernels/gpu/push.cuh"

namespace jax_ep::gpu::ll {

inline constexpr uint32_t kThreads = 512;
inline constexpr uint32_t kWarps = kThreads / kWarpSize;
inline constexpr SetKind kKind = SetKind::kLlDispatch;

struct LlDispatchKernelParams {
  DeviceRank device;
  Part part;
  bool is_routed;
  bool has_rows;
  bool has_weights;
  bool zero_padding;
  Operation operation;        // this kernel's
  Operation start_operation;  // the one whose flags are waited for
  uint32_t num_send_blocks;
  uint32_t num_bulk_warps;  // of a block that send with bulk copies, 0: rows are stored by lanes
  Pieces pieces;
  uint32_t row_words;
  uint64_t row_bytes;
  const std::byte* x;          // [T, H] or null
  const int32_t* topk_idx;     // [T * K], routed
  const float* weights;        // [T * K] or null
  const int32_t* given_slots;  // [T * K], planned
  LlPlanParams plan;           // outputs; recv_src and recv_topk_idx are inputs if planned
  std::byte* recv_x;           // [R, H] or null
  float* recv_weights;         // [R]; rank_major [N * T * K]; or null
  const std::byte* y;          // [R, H] or null
  const float* row_weights;    // [R] or null
  float* recv_dots;            // [R] or null
  const int32_t* epoch_in;     // done
  int32_t* epoch_out;          // start
};

extern __shared__ __align__(128) int32_t shared_ints[];

// One warp copies `count` aligned 4-byte words.
__device__ inline void WarpCopyInts(void* to, const void* from, uint32_t count) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(from) % sizeof(uint4) == 0;
  const uint32_t num_quads = is_aligned ? count / 4 : 0;
  constexpr uint32_t kInFlight = 4;
  for (uint32_t first = LaneId(); first < num_quads; first += kInFlight * kWarpSize) {
    uint4 words[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (first + i * kWarpSize < num_quads) {
        words[i] = static_cast<const uint4*>(from)[first + i * kWarpSize];
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (first + i * kWarpSize < num_quads) {
        static_cast<uint4*>(to)[first + i * kWarpSize] = words[i];
      }
    }
  }
  for (uint32_t i = num_quads * 4 + LaneId(); i < count; i += kWarpSize) {
    static_cast<uint32_t*>(to)[i] = static_cast<const uint32_t*>(from)[i];
  }
}

// One warp: the words of a range, once read and written to `rows` rows of `to`, `stride` apart.
template <typename Word>
__device__ inline void WarpCopyWords(std::byte* to, uint64_t stride, const int32_t* rows,
                                     uint32_t num_rows, const std::byte* from, WordRange range) {
  constexpr uint32_t kInFlight = 8;
  for (uint32_t first = range.begin + LaneId(); first < range.end; first += kInFlight * kWarpSize) {
    Word words[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (first + i * kWarpSize < range.end) {
        words[i] = reinterpret_cast<const Word*>(from)[first + i * kWarpSize];
      }
    }
    for (uint32_t copy = 0; copy < num_rows; ++copy) {
      auto* row = reinterpret_cast<Word*>(to + static_cast<uint64_t>(rows[copy]) * stride);
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        if (first + i * kWarpSize < range.end) row[first + i * kWarpSize] = words[i];
      }
    }
  }
}
template <typename Word>
__device__ inline void WarpZeroWords(std::byte* row, WordRange range) {
  for (uint32_t i = range.begin + LaneId(); i < range.end; i += kWarpSize) {
    reinterpret_cast<Word*>(row)[i] = Word{};
  }
}

}  // namespace jax_ep::gpu::ll
