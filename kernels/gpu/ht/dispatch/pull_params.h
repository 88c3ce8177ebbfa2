// Parameters and launchers of the kernels that pull rows from their owners into this rank's arrays.
#pragma once

#include <cstdint>

#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/network/token_slices.h"
#include "kernels/gpu/protocol/device_rank.h"

namespace jax_ep::gpu {

struct PullParams {
  DeviceRank device;
  Layout layout;
  bool zero_padding;
  bool is_vectorised;  // rows are multiples of 16 bytes and 16-byte aligned
  uint64_t num_tokens;
  TokenSlice slice;  // of every source's tokens that this kernel pulls
  uint64_t recv_rows;
  uint64_t row_bytes;
  uint32_t max_blocks;
  const int32_t* recv_src;       // [R]
  const int32_t* recv_topk_idx;  // [N * T * K]
  std::byte* recv_x;             // [R, H] or null
  float* recv_weights;           // [R]; rank_major [N * T * K]; or null
  // Weighted dispatch only.
  const std::byte* y;        // [R, H] or null
  const float* row_weights;  // [R] or null
  float* recv_dots;          // [R] or null
  // Bulk copies only: a row travels in pieces, each warp has ring_slots of them in flight.
  uint32_t piece_bytes;
  uint32_t ring_slots;
  uint32_t zero_bytes;  // of the block's buffer of zeroes; weighted dispatch only
};

const char* PreparePullRows(const RankHandle& rank);
const char* LaunchPullRows(const PullParams& params, cudaStream_t stream);
// The device has bulk copies, and rows are made of 16-byte words.
const char* PreparePullRowsInBulk(const RankHandle& rank);
const char* LaunchPullRowsInBulk(RankHandle& rank, const PullParams& call, cudaStream_t stream);
// With row_weights or y.
const char* PreparePullWeightedRows(const RankHandle& rank);
const char* LaunchPullWeightedRows(RankHandle& rank, const PullParams& call, cudaStream_t stream);

}  // namespace jax_ep::gpu
