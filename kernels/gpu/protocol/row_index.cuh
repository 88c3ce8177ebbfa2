// The inverse of recv_src for one operation: which rows of this rank hold a pair (source, token,
// k). Entries carry the operation's tag, so that nobody has to clear the table; none is 0.
#pragma once

#include <cstdint>

#include "kernels/gpu/protocol/control.cuh"
#include "kernels/gpu/protocol/sequence_tag.cuh"

namespace jax_ep::gpu {

inline constexpr uint32_t kMaxTopK = 64;
inline constexpr int32_t kNoRow = -1;
inline constexpr uint32_t kEntriesPerLane = kMaxTopK / kWarpSize;  // of a token

class RowIndex {
 public:
  __device__ RowIndex(const DeviceRank& device, uint64_t sequence, uint64_t num_tokens)
      : entries_(OwnHeapAt<uint64_t>(device, device.layout.row_index)),
        tag_(TagOf(sequence)),
        num_tokens_(num_tokens),
        top_k_(device.shape.top_k) {}

  __device__ uint64_t Cell(uint32_t source, uint64_t token, uint32_t k) const {
    return (source * num_tokens_ + token) * top_k_ + k;
  }
  __device__ void Put(uint32_t source, uint64_t token, uint32_t k, int32_t row) const {
    entries_[Cell(source, token, k)] =
        (static_cast<uint64_t>(tag_) << kTagBits) | static_cast<uint32_t>(row);
  }
  __device__ uint64_t Entry(uint32_t source, uint64_t token, uint32_t k) const {
    return entries_[Cell(source, token, k)];
  }
  // Row of an entry, kNoRow if it is of another operation.
  __device__ int32_t RowOf(uint64_t entry) const {
    return entry >> kTagBits == tag_ ? static_cast<int32_t>(entry) : kNoRow;
  }

 private:
  uint64_t* entries_;
  uint32_t tag_;
  uint64_t num_tokens_;
  uint32_t top_k_;
};

// One warp: what the index says of a token's pairs, on its way once it is loaded. Nothing (0)
// beyond the last pair.
struct TokenEntries {
  uint64_t of_lane[kEntriesPerLane];

  __device__ void Load(const RowIndex& index, uint32_t source, uint64_t token, uint32_t top_k) {
#pragma unroll
    for (uint32_t i = 0; i < kEntriesPerLane; ++i) {
      const uint32_t k = i * kWarpSize + LaneId();
      of_lane[i] = k < top_k ? index.Entry(source, token, k) : 0;
    }
  }
};

// Spreads consecutive tokens over the sources in an order that no stride of the grid follows.
__device__ inline uint32_t Scatter(uint64_t index) {
  return static_cast<uint32_t>(index * 0x9e3779b97f4a7c15ull >> 40);
}

}  // namespace jax_ep::gpu
