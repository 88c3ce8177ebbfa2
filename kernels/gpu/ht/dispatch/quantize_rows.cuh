// The warps of a pull that quantise this rank's rows into its stage, chunk by chunk, while others
// pull what peers have quantised. A chunk's flag says at each rank that it can be read.
//
// Warps take chunks from a counter, so that what somebody waits for is always in the hands of a
// warp that runs, however few blocks of a grid do.
#pragma once

#include "kernels/gpu/device/record_units.cuh"
#include "kernels/gpu/ht/dispatch/pull_params.h"
#include "kernels/gpu/protocol/control.cuh"

namespace jax_ep::gpu {

// The records of a rank, and the flag of one of them by its source, in the heap of `owner`.
__device__ inline std::byte* RecordOf(const PullParams& params, uint32_t source, uint64_t token) {
  const DeviceRank& device = params.device;
  return HeapAt<std::byte>(device, source, device.layout.stage_rows) + token * params.wire_bytes;
}
__device__ inline uint64_t* RecordFlag(const DeviceRank& device, uint32_t owner, uint32_t source,
                                       uint64_t chunk) {
  return HeapAt<uint64_t>(device, owner, device.layout.record_flags) +
         source * device.layout.num_record_chunks + chunk;
}

// One thread waits until a record can be read. False: this rank has failed.
__device__ inline bool WaitRecord(const PullParams& params, uint64_t sequence, uint32_t source,
                                  uint64_t token) {
  const DeviceRank& device = params.device;
  const uint64_t* flag = RecordFlag(device, device.rank, source, token / kRecordTokens);
  return WaitFlag(device, flag, source, Operation::kDispatch,
                  FlagValue(sequence, Operation::kDispatch, device.program));
}

// One warp. Each rank's stage was read to the end when it left its last dispatch, so nothing is
// waited for; but a rank that has failed must not come here.
template <typename Elem>
class RowQuantizer {
 public:
  __device__ RowQuantizer(const PullParams& params, uint64_t sequence)
      : params_(params), sequence_(sequence) {}

  // Starts to take a chunk.
  __device__ void Take() {
    if (LaneId() == 0) taken_ = atomicAdd(&ControlOf(params_.device)->chunks_taken, 1u);
  }
  // Quantises the chunk that was taken and takes the next one. False: there was none left.
  __device__ bool QuantizeChunk() {
    const uint64_t chunk = FromLane(taken_, 0);
    const uint64_t begin = chunk * kRecordTokens;
    if (begin >= params_.num_tokens) return false;
    Take();
    const DeviceRank& device = params_.device;
    const uint64_t end = min(begin + kRecordTokens, params_.num_tokens);
    const uint64_t row_bytes = params_.format.hidden() * sizeof(typename Elem::Storage);
    for (uint64_t token = begin; token < end; ++token) {
      std::byte* record = RecordOf(params_, device.rank, token);
      ForUnits(ElementUnits<Elem>(params_.format, params_.x + token * row_bytes), 0,
               params_.format.num_units, [&](uint32_t unit, const Unit& in_hand) {
                 StoreInRecord(params_.format, record, unit, in_hand);
               });
    }
    SyncWarp();
    const uint64_t value = FlagValue(sequence_, Operation::kDispatch, device.program);
    for (uint32_t peer = LaneId(); peer < device.shape.num_ranks; peer += kWarpSize) {
      StoreReleaseSys(RecordFlag(device, peer, device.rank, chunk), value);
    }
    return true;
  }

 private:
  const PullParams& params_;
  uint64_t sequence_;
  uint32_t taken_ = 0;  // in lane 0
};

// One warp, before the block waits for its peers: they wait for these.
template <typename Elem>
__device__ inline void QuantizeFirst(const DeviceRank& device, RowQuantizer<Elem>& quantizer) {
  quantizer.Take();
  if (FromLane(static_cast<uint32_t>(HasFailed(device)), 0) == 0) quantizer.QuantizeChunk();
}

}  // namespace jax_ep::gpu
