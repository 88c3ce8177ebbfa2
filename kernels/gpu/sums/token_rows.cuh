// kernels/gpu/sums: the fixed order of additions (docs/semantics.md), for all combines.
//   In: the rows that a rank holds of a token, the partials of other ranks. Out: one sum, in f32.
//   Waits: nothing. The caller has waited for what it passes.
//
// The rows that a rank holds of one token, and how they are added: what the kernels share that
// combine without bulk copies.
#pragma once

#include "kernels/gpu/device/elements.cuh"
#include "kernels/gpu/protocol/row_index.cuh"

namespace jax_ep::gpu {

// The local rows of one token of one source, ascending. In shared memory, one per warp.
struct TokenRows {
  int32_t by_k[kMaxTopK];  // row of pair k, kNoRow if it has none here
  int32_t rows[kMaxTopK];
  float weights[kMaxTopK];
};

// One warp. Number of local rows.
template <typename Params>
__device__ uint32_t FindRows(const Params& params, const RowIndex& index, uint32_t source,
                             uint64_t token, TokenRows& local) {
  const uint32_t top_k = params.device.shape.top_k;
  SyncWarp();  // the token before has been read
  for (uint32_t k = LaneId(); k < top_k; k += kWarpSize) {
    local.by_k[k] = index.RowOf(index.Entry(source, token, k));
  }
  SyncWarp();
  uint32_t count = 0;
  for (uint32_t first = 0; first < top_k; first += kWarpSize) {
    const uint32_t k = first + LaneId();
    const int32_t row = k < top_k ? local.by_k[k] : kNoRow;
    count += CountLanes(Ballot(row >= 0));
    if (row < 0) continue;
    uint32_t lower = 0;
    for (uint32_t other = 0; other < top_k; ++other) {
      const int32_t other_row = local.by_k[other];
      lower += other_row >= 0 && other_row < row;
    }
    local.rows[lower] = row;
    local.weights[lower] = params.row_weights != nullptr ? params.row_weights[row] : 1.0f;
  }
  SyncWarp();
  return count;
}

// Scalar of pair k at this rank, where `local` is its token.
template <typename Params>
__device__ inline float ScalarOf(const Params& params, const TokenRows& local, uint32_t k) {
  if (params.layout != Layout::kRankMajor) {
    return local.by_k[k] >= 0 ? params.pair_scalars[local.by_k[k]] : 0.0f;
  }
  return params.pair_scalars[static_cast<uint64_t>(local.rows[0]) * params.device.shape.top_k + k];
}

// Adds a row's words, weighted; the first one begins the sums.
template <typename Elem, typename Word, uint32_t kWords, uint32_t kElems>
__device__ inline void AddRow(const Word (&words)[kWords], float weight, bool is_first,
                              float (&sums)[kWords][kElems]) {
#pragma unroll
  for (uint32_t j = 0; j < kWords; ++j) {
    float values[kElems];
    Unpack<Elem>(words[j], values);
#pragma unroll
    for (uint32_t e = 0; e < kElems; ++e) {
      const float product = Multiply(weight, values[e]);
      sums[j][e] = is_first ? product : Add(sums[j][e], product);
    }
  }
}

}  // namespace jax_ep::gpu
