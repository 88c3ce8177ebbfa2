// The rows that a rank holds of one token, and how they are added.
#pragma once

#include "kernels/gpu/device/elements.cuh"
#include "kernels/gpu/protocol/row_index.cuh"

namespace jax_ep::gpu {

// One warp: the rows that this rank holds of a token. A lane has pairs PairOf(i), i < kPairs.
template <uint32_t kPairs = kEntriesPerLane>
struct TokenRows {
  int32_t row[kPairs];          // of the pair; kNoRow: it has none here
  uint32_t lower[kPairs] = {};  // rows of the token below it
  uint32_t count = 0;           // of the token

  __device__ TokenRows() {
#pragma unroll
    for (int32_t& none : row) none = kNoRow;
  }
  // row_of(k): of a pair. top_k <= kPairs * kWarpSize.
  template <typename RowOf>
  __device__ TokenRows(uint32_t top_k, RowOf&& row_of) {
#pragma unroll
    for (uint32_t i = 0; i < kPairs; ++i) {
      row[i] = PairOf(i) < top_k ? row_of(PairOf(i)) : kNoRow;
      count += CountLanes(Ballot(row[i] >= 0));
    }
    if (count == 0) return;
#pragma unroll
    for (uint32_t other = 0; other < kPairs; ++other) {
      const uint32_t first = other * kWarpSize;
      const uint32_t end = other + 1 == kPairs ? top_k : min(top_k, first + kWarpSize);
      for (uint32_t k = first; k < end; ++k) {
        const auto other_row = static_cast<uint32_t>(FromLane(row[other], k - first));
#pragma unroll
        for (uint32_t i = 0; i < kPairs; ++i) lower[i] += other_row < static_cast<uint32_t>(row[i]);
      }
    }
  }

  __device__ static uint32_t PairOf(uint32_t i) { return i * kWarpSize + LaneId(); }

  // The scalar at this rank of the lane's pair i, in all lanes; the token has rows, the call has
  // scalars.
  template <typename Call>
  __device__ float PairScalar(const Call& call, uint32_t i) const {
    if (call.layout != Layout::kRankMajor) return row[i] >= 0 ? call.pair_scalars[row[i]] : 0.0f;
    int32_t only = kNoRow;  // a rank has one row of a token there
#pragma unroll
    for (uint32_t j = 0; j < kPairs; ++j) only = max(only, row[j]);
    const uint32_t top_k = call.device.shape.top_k;
    const uint64_t first = static_cast<uint64_t>(WarpMax(only)) * top_k;
    return PairOf(i) < top_k ? call.pair_scalars[first + PairOf(i)] : 0.0f;
  }
};

// The same rows, ascending, for all lanes. In shared memory, one per warp.
struct RowList {
  int32_t rows[kMaxTopK];
  float weights[kMaxTopK];
  // Of a sum over few ranks, by leaf: where the partial of another one is, or null
  // (token_sums.cuh).
  static constexpr uint32_t kMostPartials = 8;
  const std::byte* partials[kMostPartials];
};

// One warp: the rows of a token of `source`, also in `list`.
template <typename Call>
__device__ TokenRows<> FindRows(const Call& call, const RowIndex& index, uint32_t source,
                                uint64_t token, RowList& list) {
  const TokenRows<> found(call.device.shape.top_k,
                          [&](uint32_t k) { return index.RowOf(index.Entry(source, token, k)); });
  SyncWarp();  // the token before has been read
#pragma unroll
  for (uint32_t i = 0; i < kEntriesPerLane; ++i) {
    const int32_t row = found.row[i];
    if (row < 0) continue;
    list.rows[found.lower[i]] = row;
    list.weights[found.lower[i]] = call.row_weights != nullptr ? call.row_weights[row] : 1.0f;
  }
  SyncWarp();
  return found;
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
