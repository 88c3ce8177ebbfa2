// Parameters and launchers of the kernels of an HT combine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/network/token_slices.h"
#include "kernels/gpu/protocol/entry.h"

namespace jax_ep::gpu {

struct CombineKernelParams {
  DeviceRank device;
  Entry entry;
  Layout layout;
  uint32_t num_tokens;
  uint32_t num_chunks;  // of kChunkTokens
  uint32_t lag;         // chunks between a partial and its use; without bulk copies
  uint32_t max_blocks;
  uint64_t mean_rows;  // of this rank, if all route uniformly
  uint32_t recv_rows;  // R
  int32_t rank_rows;   // slots of one rank in send_slot
  uint64_t row_bytes;
  const std::byte* y;         // [R, H] or null
  const float* row_weights;   // [R] or null
  const float* pair_scalars;  // [R], rank_major [R * K], or null: goes back to each pair
  const int32_t* send_slot;   // [T * K]
  std::byte* out;             // [T, H] or null
  float* pair_scalars_out;    // [T * K] or null
  // Bulk copies only (combine_rows_in_bulk.cu).
  uint32_t piece_elems;     // that a ring slot holds
  uint32_t partial_blocks;  // the first to start, which make partials before sums
  uint32_t partial_teams;   // of such a block that do so
  uint32_t num_teams;       // of a block
  uint32_t reducers;        // warps of a team that sum
  uint32_t group_rows;      // rows of a sum that are handed over at once, at most
  uint32_t ring_slots;      // of a team
  uint32_t slot_bytes;
  uint32_t team_bytes;  // of shared memory
  // Over several nodes only (network/combine.cu): the tokens of this kernel, of each owner.
  TokenSlice slice;
};

// Without rows, in a group of one node.
const char* PrepareCombineScalars(const RankHandle& rank);
const char* LaunchCombineScalars(const CombineKernelParams& call, cudaStream_t stream);
const char* PrepareCombineRows(const RankHandle& rank);
const char* LaunchCombineRows(RankHandle& rank, const CombineKernelParams& call, bool is_vectorised,
                              cudaStream_t stream);
// The device has bulk copies, and rows are made of 16-byte words.
const char* PrepareCombineRowsInBulk(const RankHandle& rank);
const char* LaunchCombineRowsInBulk(RankHandle& rank, const CombineKernelParams& call,
                                    cudaStream_t stream);

}  // namespace jax_ep::gpu
