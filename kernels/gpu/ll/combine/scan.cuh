// How the blocks of an LL combine find the rows of their items.
#pragma once

#include "kernels/gpu/ll/combine/params.cuh"

namespace jax_ep::gpu::slot_combine {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// What recv_src says, read by all warps of a block. In expert_batched the rows of a zone that are
// used come first, and zones are mostly padding: a few lanes take a zone each, and stop where it
// ends. Else each warp takes a part of it, through its share of the shared memory.
class SrcScan {
 public:
  // `barrier`: of the warp, set up for one arrival by the lane that will load.
  __device__ SrcScan(const LlCombineParams& params, uint64_t* barrier)
      : recv_src_(params.call.recv_src),
        num_rows_(
            params.call.part == CallPart::kDone ? 0 : static_cast<uint32_t>(params.call.recv_rows)),
        quads_(reinterpret_cast<int4*>(ll_combine_shared + params.table_bytes +
                                       WarpId() * params.add_buffer_bytes)),
        most_rows_(min(params.add_buffer_bytes / static_cast<uint32_t>(sizeof(int32_t)) / kStep,
                       kMostSteps) *
                   kStep),
        barrier_(barrier) {
    const GroupShape& shape = params.call.device.shape;
    const uint32_t zone_rows = shape.num_ranks * params.call.num_tokens;
    if (params.call.layout == Layout::kExpertBatched && num_rows_ > 0 && zone_rows % kQuad == 0 &&
        zone_rows * shape.experts_per_rank() == num_rows_) {
      zone_quads_ = zone_rows / kQuad;
      num_zones_ = shape.experts_per_rank();
      LoadZones(0);
      return;
    }
    const uint32_t share = (num_rows_ / kWarps + kStep - 1) / kStep * kStep;
    begin_ = min(WarpId() * share, num_rows_);
    end_ = WarpId() == kWarps - 1 ? num_rows_ : min(begin_ + share, num_rows_);
    Load();
  }

  // put(src, row) for all rows that are used, and for some that are not (src < 0). All threads of
  // the block, once.
  template <typename Put>
  __device__ void Run(Put&& put) {
    if (zone_quads_ != 0) return RunZones(put);
    for (uint32_t parity = 0; begin_ < end_; parity ^= 1) {
      const uint32_t num_rows = NumLoaded();
      if (num_rows > 0) BarrierWait(barrier_, parity);
      const uint32_t num_quads = num_rows / kQuad;
      uint32_t used = 0;  // steps in which the lane's quad has rows
#pragma unroll 4
      for (uint32_t step = 0; step * kWarpSize < num_quads; ++step) {
        const uint32_t at = QuadOf(step);
        if (at >= num_quads) continue;
        used |= IsUsed(quads_[at]) ? 1u << step : 0;
      }
      for (; used != 0; used &= used - 1) {
        const uint32_t at = QuadOf(static_cast<uint32_t>(__ffs(static_cast<int>(used))) - 1);
        PutQuad(quads_[at], begin_ + at * kQuad, put);
      }
      begin_ += num_rows;
      if (end_ - begin_ < kQuad) break;
      SyncWarp();  // the buffer has been read
      Load();
    }
    // What is no whole unit of bulk copies.
    for (uint32_t row = begin_ + LaneId(); row < end_; row += kWarpSize) {
      put(recv_src_[row], row);
    }
  }

 private:
  static constexpr uint32_t kQuad = 4;
  static constexpr uint32_t kStep = kQuad * kWarpSize;
  static constexpr uint32_t kMostSteps = 32;
  static constexpr uint32_t kZoneLanes = 8;
  static constexpr uint32_t kZonesOfWarp = kWarpSize / kZoneLanes;
  static constexpr uint32_t kZonesInFlight = 2;

  __device__ static bool IsUsed(int4 quad) { return (quad.x & quad.y & quad.z & quad.w) >= 0; }
  template <typename Put>
  __device__ static void PutQuad(int4 quad, uint32_t row, Put&& put) {
    put(quad.x, row);
    put(quad.y, row + 1);
    put(quad.z, row + 2);
    put(quad.w, row + 3);
  }

  // The lane's, of its group's zones in one round.
  __device__ uint32_t ZoneAt(uint32_t round, uint32_t i) const {
    return ((round * kZonesInFlight + i) * kWarps + WarpId()) * kZonesOfWarp +
           LaneId() / kZoneLanes;
  }
  // Nothing beyond the last zone or its end.
  __device__ int4 ZoneQuad(uint32_t zone, uint32_t quad) const {
    if (zone >= num_zones_ || quad >= zone_quads_) return int4{-1, -1, -1, -1};
    return reinterpret_cast<const int4*>(recv_src_)[zone * zone_quads_ + quad];
  }
  __device__ void LoadZones(uint32_t round) {
#pragma unroll
    for (uint32_t i = 0; i < kZonesInFlight; ++i) {
      zones_[i] = ZoneQuad(ZoneAt(round, i), LaneId() % kZoneLanes);
    }
  }
  template <typename Put>
  __device__ void RunZones(Put&& put) {
    constexpr uint32_t kZonesOfRound = kZonesInFlight * kWarps * kZonesOfWarp;
    for (uint32_t round = 0; round * kZonesOfRound < num_zones_; ++round) {
#pragma unroll
      for (uint32_t i = 0; i < kZonesInFlight; ++i) {
        const uint32_t zone = ZoneAt(round, i);
        int4 quad = zones_[i];
        for (uint32_t at = LaneId() % kZoneLanes;; at += kZoneLanes) {
          if (IsUsed(quad)) PutQuad(quad, (zone * zone_quads_ + at) * kQuad, put);
          // The group's last one is full: there may be more.
          const bool has_more = FromLane(quad.w, LaneId() | (kZoneLanes - 1)) >= 0;
          if (Ballot(has_more) == 0) break;
          quad = has_more ? ZoneQuad(zone, at + kZoneLanes) : int4{-1, -1, -1, -1};
        }
      }
      LoadZones(round + 1);
    }
  }

  // A lane's in a step. Used rows are neighbours, and often so many rows apart that lanes would
  // always meet them or never: so lanes turn from step to step.
  __device__ uint32_t QuadOf(uint32_t step) const {
    constexpr uint32_t kTurn = 2;
    return step * kWarpSize + (LaneId() + kTurn * step) % kWarpSize;
  }
  __device__ uint32_t NumLoaded() const { return min((end_ - begin_) / kQuad * kQuad, most_rows_); }
  __device__ void Load() const {
    const uint32_t num_bytes = NumLoaded() * static_cast<uint32_t>(sizeof(int32_t));
    if (LaneId() != 0 || num_bytes == 0) return;
    BarrierExpectBytes(barrier_, num_bytes);
    BulkLoad(quads_, recv_src_ + begin_, num_bytes, barrier_);
  }

  const int32_t* recv_src_;
  uint32_t num_rows_;
  int4* quads_;
  uint32_t most_rows_;  // at once
  uint64_t* barrier_;
  uint32_t begin_ = 0, end_ = 0;
  uint32_t zone_quads_ = 0;  // of a zone; 0: no zones
  uint32_t num_zones_ = 0;
  int4 zones_[kZonesInFlight];  // what the lane has loaded
};
#endif

}  // namespace jax_ep::gpu::slot_combine
