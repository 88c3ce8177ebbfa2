// Launchers of the kernels that speak with other nodes. Each runs between the kernels of an
// operation, or in their place; only groups of several nodes use them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/network/token_slices.h"

namespace jax_ep::gpu {

const char* PrepareNetPlanKernels(const RankHandle& rank);
const char* LaunchExchangeCounts(RankHandle& rank, cudaStream_t stream);
const char* LaunchExchangeLists(RankHandle& rank, const PlanParams& plan, cudaStream_t stream);

// The slices of an HT call. `row_bytes`: of a row on the wire, 0 in calls without rows. A token has
// one for each other node that wants it, as a rule for as many as there can be.
inline TokenCut CutOf(const RankHandle& rank, uint64_t num_tokens, uint64_t row_bytes) {
  const GroupShape& shape = rank.device.shape;
  const uint64_t token_bytes = row_bytes * std::min(shape.num_nodes() - 1, shape.top_k);
  return TokenCut(num_tokens, rank.device.layout.rounds, shape.num_nodes(), rank.has_fast_wire,
                  num_tokens * token_bytes / rank.least_slice_bytes);
}

// Rows of slices of a dispatch to the rails of other nodes; and the wait for what comes from there.
const char* PrepareNetDispatchKernels(const RankHandle& rank);
const char* LaunchSendRows(RankHandle& rank, const DispatchParams& call, const SliceSpan& slices,
                           cudaStream_t stream);
const char* LaunchAwaitRows(RankHandle& rank, const TokenSlice& slice, cudaStream_t stream);

// A whole HT combine, after EnterOperation.
struct CombineKernelParams;  // combine_params.h
const char* PrepareNetCombineKernels(const RankHandle& rank);
const char* LaunchNetCombine(RankHandle& rank, const CombineKernelParams& call, bool is_vectorised,
                             cudaStream_t stream);

// LL: rows of a start to other nodes.
const char* PrepareNetSlotKernels(const RankHandle& rank);
struct SendRecordsParams {
  DeviceRank device;
  Operation operation;
  bool is_routed;
  uint32_t num_tokens;
  uint32_t rank_ids;  // so many ids are of one rank
  PushHeader header;
  uint64_t row_bytes;
  const std::byte* x;    // [T, H] or null
  const int32_t* ids;    // [T * K]: topk_idx, or the send_slot of a plan
  const float* weights;  // [T * K] or null
};
const char* LaunchSendRecords(RankHandle& rank, const SendRecordsParams& call, cudaStream_t stream);
// LL: before the start of a combine, its pairs into the row index.
struct IndexPairsParams {
  DeviceRank device;
  Operation operation;
  LlRound round;
  uint32_t num_tokens;  // of the round
  const int32_t* recv_src;
  uint64_t recv_rows;
};
const char* LaunchIndexPairs(RankHandle& rank, const IndexPairsParams& call, cudaStream_t stream);
// LL: what a done takes in of what other nodes have sent (take_records.cuh).
struct RecordsToTake {
  Operation operation;
  Operation start_operation;
  SetKind kind;
  uint32_t num_tokens;
  uint32_t num_pieces;  // flags of a row
  bool has_rows;
  bool has_ids, has_weights;  // of a dispatch
  uint32_t num_parts;         // in which blocks share the records of a rank

  // Of a dispatch without rows nothing but the head has come.
  __host__ __device__ uint32_t num_records() const {
    return kind == SetKind::kLlDispatch && !has_rows ? 0 : num_tokens;
  }
};
// For the done of `epoch`: chooses taken.num_parts, and how many of its first blocks take. 0: a
// kernel in front of it does, which is launched.
const char* PrepareToTake(RankHandle& rank, const int32_t* epoch, RecordsToTake& taken,
                          uint32_t& num_take_blocks, cudaStream_t stream);

}  // namespace jax_ep::gpu
