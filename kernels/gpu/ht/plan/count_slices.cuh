// First part of a plan in one kernel: a block numbers the pairs of a slice by expert, keeps them
// where every rank can read them, and sends their counts to all.
//
// Each has a slice that it begins with. While other kernels hold the SMs some may not be running,
// and wait for others of their rank to end: so a block that misses slices of its own rank counts
// these, too. A slice is counted by the block that claims it first, which runs, and by no other:
// numbers that peers read by then must not be written again, nor invalid ids be added up twice.
#pragma once

#include "kernels/gpu/ht/plan/count_pairs.cuh"

namespace jax_ep::gpu::planning {

// A pair as others read it: its expert, and how many pairs of that expert come before it in its
// slice.
struct PairEntry {
  uint32_t bits;

  static constexpr uint32_t kNone = ~0u;  // a pair without a place
  __device__ static PairEntry Of(int32_t expert, int32_t number) {
    return {static_cast<uint32_t>(expert) << 16 | static_cast<uint32_t>(number)};
  }
  __device__ bool HasPlace() const { return bits != kNone; }
  __device__ uint32_t expert() const { return bits >> 16; }
  __device__ uint32_t number() const { return bits & 0xffff; }
};

// Before the counts [E] of a slice, 16 bits each.
struct SliceHeader {
  PlanHeader plan;  // of the slice
  __device__ uint16_t* counts() { return reinterpret_cast<uint16_t*>(this + 1); }
};

__device__ inline SliceHeader* SliceAt(const DeviceRank& device, uint32_t owner, uint64_t set,
                                       uint32_t source, uint32_t slice) {
  const GpuHeapLayout& layout = device.layout;
  return HeapAt<SliceHeader>(device, owner,
                             layout.plan_slices.At(set, source) + slice * layout.plan_slice_stride);
}
__device__ inline PairEntry* EntriesOf(const DeviceRank& device, uint64_t set, uint32_t source) {
  return HeapAt<PairEntry>(device, source, device.layout.plan_entries.At(set, 0));
}
__device__ inline uint64_t SliceFlag(const DeviceRank& device, uint32_t source, uint32_t slice) {
  return device.layout.slice_flags + (source * kMaxPlanSlices + slice) * sizeof(uint64_t);
}

struct SliceNumbers {
  PairEntry* of_pair;

  __device__ void Put(uint32_t pair, int32_t expert, int32_t number) const {
    of_pair[pair] = number < 0 ? PairEntry{PairEntry::kNone} : PairEntry::Of(expert, number);
  }
  __device__ void Add(uint32_t pair, const int32_t* counts) const {
    const PairEntry entry = of_pair[pair];
    if (entry.HasPlace()) of_pair[pair].bits += static_cast<uint32_t>(counts[entry.expert()]);
  }
};

class SliceClaim {
 public:
  // All threads of the block, which learn of the answer later. It may be doubtful: others have
  // begun to claim the slice.
  __device__ SliceClaim(const PlanKernelParams& params, uint64_t sequence, uint32_t slice,
                        bool is_doubtful)
      : is_doubtful_(is_doubtful),
        value_(FlagValue(sequence, Operation::kPlan, params.device.program)) {
    if (threadIdx.x != kThread || slice >= params.num_blocks) return;
    const DeviceRank& device = params.device;
    auto* claim = OwnHeapAt<unsigned long long>(device, device.layout.slice_claims) + slice;
    before_ = atomicExch(claim, static_cast<unsigned long long>(value_));
  }
  __device__ bool IsDoubtful() const { return is_doubtful_; }
  // All threads, in place of a SyncBlock; then IsMine can be asked.
  __device__ void Settle() { is_mine_ = SyncBlockAny(threadIdx.x == kThread && before_ != value_); }
  __device__ bool IsMine() const { return is_mine_; }

 private:
  static constexpr uint32_t kThread = 3 * kWarpSize;

  bool is_doubtful_;
  bool is_mine_ = false;
  uint64_t value_;
  uint64_t before_ = 0;  // of kThread; nothing waits for it until Settle does
};

// All threads of the block. batch: of the slice's first pairs.
__device__ inline void CountSlice(const PlanKernelParams& params, uint64_t sequence, uint64_t set,
                                  uint32_t slice, const ExpertBatch& batch, SliceClaim& claim) {
  const DeviceRank& device = params.device;
  const auto for_mates = [&](auto&& visit) {
    for (uint32_t peer = device.node_begin; peer < MatesEnd(device); ++peer) {
      visit(SliceAt(device, peer, set, SenderTo(device, peer), slice), IsActive(device, peer));
    }
  };
  const PairDrops drops =
      CountBlock(params, slice, batch, claim, SliceNumbers{EntriesOf(device, set, device.rank)},
                 [&](uint32_t expert, int32_t count) {
                   for_mates([&](SliceHeader* header, bool is_active) {
                     header->counts()[expert] = static_cast<uint16_t>(is_active ? count : 0);
                   });
                 });
  if (!claim.IsMine()) return;
  if (drops.invalid > 0 && threadIdx.x == 0) {
    CountUp(&ControlOf(device)->invalid_ids, static_cast<uint64_t>(drops.invalid));
  }
  if (drops.invalid > 0 && device.debug) {  // peers learn of that, and of nothing else
    if (threadIdx.x == 0) {
      Fail(device, FailureKind::kInvalidId, Operation::kPlan, device.rank, 0,
           static_cast<uint64_t>(drops.invalid));
    }
    return;
  }
  if (threadIdx.x == 0) {
    PlanHeader plan = {drops.dropped, static_cast<int32_t>(params.num_tokens), params.recv_rows,
                       static_cast<uint16_t>(params.layout), static_cast<uint16_t>(device.program)};
    for_mates([&](SliceHeader* header, bool is_active) {
      plan.num_locally_dropped = is_active ? drops.dropped : 0;
      header->plan = plan;
    });
  }
  SyncBlock();
  // This rank's other blocks wait for it, too.
  const uint64_t value = FlagValue(sequence, Operation::kPlan, device.program);
  for (uint32_t mate = device.node_begin + threadIdx.x; mate < MatesEnd(device); mate += kThreads) {
    const uint64_t flag = SliceFlag(device, SenderTo(device, mate), slice);
    StoreReleaseSys(HeapAt<uint64_t>(device, mate, flag), value);
  }
}

}  // namespace jax_ep::gpu::planning
