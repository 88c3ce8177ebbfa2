// The warps of a pull that quantise this rank's rows into its stage while others pull what peers
// have quantised. A row's flag says at each rank that its record can be read.
//
// Warps take rows from a counter, so that what somebody waits for is always in the hands of a warp
// that runs, however few blocks of a grid do.
#pragma once

#include "kernels/gpu/device/element_units.cuh"
#include "kernels/gpu/ht/dispatch/pull_params.h"
#include "kernels/gpu/protocol/control.cuh"

namespace jax_ep::gpu {

// The records of a rank, and the flag of one of them by its source, in the heap of `owner`.
__device__ inline std::byte* RecordOf(const PullParams& params, uint32_t source, uint64_t token) {
  const DeviceRank& device = params.device;
  return HeapAt<std::byte>(device, source, device.layout.stage_rows) +
         token * RecordPitch(params.wire_bytes);
}
__device__ inline uint64_t* RecordFlag(const DeviceRank& device, uint32_t owner, uint32_t source,
                                       uint64_t token) {
  return HeapAt<uint64_t>(device, owner, device.layout.record_flags) +
         source * device.layout.num_record_flags + token;
}

// One thread waits until a record can be read. False: this rank has failed.
__device__ inline bool WaitRecord(const PullParams& params, uint64_t sequence, uint32_t source,
                                  uint64_t token) {
  const DeviceRank& device = params.device;
  const uint64_t* flag = RecordFlag(device, device.rank, source, token);
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

  // One row, which is ready soon.
  __device__ void QuantizeOne() {
    Take(1);
    QuantizeTaken(0);
  }
  // Until all rows are in somebody's hands.
  __device__ void QuantizeAll() {
    // A release takes microseconds while the wire is busy; others wait for a row meanwhile.
    constexpr uint32_t kAtOnce = 2;
    Take(kAtOnce);
    while (QuantizeTaken(kAtOnce)) continue;
  }

 private:
  // Starts to take rows.
  __device__ void Take(uint32_t count) {
    num_taken_ = count;
    if (LaneId() == 0) taken_ = atomicAdd(&ControlOf(params_.device)->records_taken, count);
  }
  // Quantises the rows that were taken and takes `num_next` more. False: there were none left.
  __device__ bool QuantizeTaken(uint32_t num_next) {
    const DeviceRank& device = params_.device;
    const uint64_t begin = FromLane(taken_, 0);
    if (begin >= params_.num_tokens) return false;
    const uint64_t end = min(begin + num_taken_, params_.num_tokens);
    if (num_next > 0) Take(num_next);
    for (uint64_t token = begin; token < end; ++token) QuantizeRow(token, end, num_next > 0);
    SyncWarp();
    // One release, whose wait for the stores is that of all rows.
    const uint64_t value = FlagValue(sequence_, Operation::kDispatch, device.program);
    const auto count = static_cast<uint32_t>(end - begin);
    for (uint32_t i = LaneId(); i < device.shape.num_ranks * count; i += kWarpSize) {
      const uint32_t peer = i / count;
      StoreReleaseSys(RecordFlag(device, peer, SenderTo(device, peer), begin + i % count), value);
    }
    return true;
  }

  // The rows from there to `end` are quantised next, then those that were taken, if any were.
  __device__ void QuantizeRow(uint64_t token, uint64_t end, bool has_taken) {
    const uint64_t row_bytes = params_.format.hidden() * sizeof(typename Elem::Storage);
    const std::byte* row = params_.x + token * row_bytes;
    if (token + 1 < end) PrefetchRow(row + row_bytes, row_bytes);
    // Lane 0 knows by now, or soon, what was taken: a row late, so that nobody waits for it.
    if (token + 1 == end && has_taken) {
      const uint64_t next = FromLane(taken_, 0);
      if (next < params_.num_tokens) PrefetchRow(params_.x + next * row_bytes, row_bytes);
    }
    std::byte* record = RecordOf(params_, params_.device.rank, token);
    ForUnits(ElementUnits<Elem>(params_.format, row), 0, params_.format.num_units,
             [&](uint32_t unit, uint32_t end_unit, const Unit& in_hand) {
               if (unit < end_unit) StoreInRecord(params_.format, record, unit, in_hand);
             });
  }
  __device__ static void PrefetchRow(const std::byte* row, uint64_t row_bytes) {
#pragma unroll 1
    for (uint64_t at = LaneId() * kLineBytes; at < row_bytes; at += kWarpSize * kLineBytes) {
      PrefetchLine(row + at);
    }
  }

  const PullParams& params_;
  uint64_t sequence_;
  uint32_t taken_ = 0;  // in lane 0: the first of the rows
  uint32_t num_taken_ = 0;
};

}  // namespace jax_ep::gpu
