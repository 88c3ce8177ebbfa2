// Parameters and launchers of the kernels that pull rows from their owners into this rank's arrays.
#pragma once

#include <cstdint>

#include "kernels/gpu/device/record_format.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/network/token_slices.h"
#include "kernels/gpu/protocol/device_rank.h"
#include "kernels/gpu/protocol/entry.h"

namespace jax_ep::gpu {

// Whose rows a kernel pulls. Between nodes those of this node's ranks come first, while the others
// are on their way.
enum class Sources : uint8_t { kAll, kMates, kOthers };

struct PullParams {
  DeviceRank device;
  Entry entry;
  Layout layout;
  bool zero_padding;
  bool is_vectorised;  // rows are multiples of 16 bytes and 16-byte aligned
  uint64_t num_tokens;
  TokenSlice slice;  // of every source's tokens that this kernel pulls
  Sources sources;
  uint64_t recv_rows;
  uint64_t row_bytes;   // of recv_x
  uint64_t wire_bytes;  // of a row that comes
  uint32_t max_blocks;
  const int32_t* recv_src;       // [R]
  const int32_t* recv_topk_idx;  // [N * T * K]
  std::byte* recv_x;             // [R, H] or null
  float* recv_weights;           // [R]; rank_major [N * T * K]; or null
  // Weighted dispatch only.
  const std::byte* y;        // [R, H] or null
  const float* row_weights;  // [R] or null
  float* recv_dots;          // [R] or null
  // Rows that travel as records only: this rank's, which the kernel quantises, and the format.
  const std::byte* x;
  RecordFormat format;
  ScalesPlace scales;
  // Bulk copies only: a row travels in pieces, each warp has ring_slots of them in flight.
  uint32_t piece_bytes;
  uint32_t ring_slots;
  uint32_t zero_bytes;  // of the block's buffer of zeroes; weighted dispatch only

  __host__ __device__ uint32_t num_sources() const {
    const GroupShape& shape = device.shape;
    if (sources == Sources::kAll) return shape.num_ranks;
    return sources == Sources::kMates ? shape.node_size : shape.num_ranks - shape.node_size;
  }
};

const char* PreparePullRows(const RankHandle& rank);
const char* LaunchPullRows(const PullParams& params, cudaStream_t stream);
// The device has bulk copies, and rows are made of 16-byte words.
const char* PreparePullRowsInBulk(const RankHandle& rank);
const char* LaunchPullRowsInBulk(RankHandle& rank, const PullParams& call, cudaStream_t stream);
// Rows that travel as records: in bulk where the device can do that.
const char* PreparePullRecords(const RankHandle& rank);
const char* LaunchPullRecords(RankHandle& rank, const PullParams& params, cudaStream_t stream);
const char* PreparePullRecordsInBulk(const RankHandle& rank);
// False: a warp's records have no room in shared memory, nothing was launched.
bool LaunchPullRecordsInBulk(RankHandle& rank, const PullParams& params, cudaStream_t stream,
                             const char** error);
// With row_weights or y.
const char* PreparePullWeightedRows(const RankHandle& rank);
const char* LaunchPullWeightedRows(RankHandle& rank, const PullParams& call, cudaStream_t stream);

}  // namespace jax_ep::gpu
