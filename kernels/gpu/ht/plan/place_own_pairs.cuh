// Second kernel of a plan in three steps: zones of all ranks from all counts, and the places of
// this rank's pairs.
#pragma once

#include "kernels/gpu/ht/plan/expert_zones.cuh"

namespace jax_ep::gpu::planning {

// What PlaceOwnPairs knows of each expert of the group, in shared memory.
struct ExpertTables : ExpertZones {
  int32_t* before_own;  // [E] pairs of lower sources
  int32_t* list_begin;  // [E] this rank's pairs of lower experts

  __device__ ExpertTables(int32_t* ints, uint32_t num_experts)
      : ExpertZones(ints, num_experts),
        before_own(ints + ExpertZones::kNumTables * num_experts),
        list_begin(before_own + num_experts) {}
  static constexpr uint32_t kNumTables = ExpertZones::kNumTables + 2;
};

__device__ inline int32_t Clamp(int32_t value, int32_t most) {
  return value < 0 ? 0 : (value > most ? most : value);
}

// One warp: exclusive sums of values(0..count) into sums.
template <typename Values>
__device__ void WarpExclusiveSums(uint32_t count, int32_t* sums, Values&& values) {
  int32_t carry = 0;
  for (uint32_t first = 0; first < count; first += kWarpSize) {
    const uint32_t i = first + LaneId();
    const int32_t value = i < count ? values(i) : 0;
    const int32_t inclusive = WarpInclusiveSum(value);
    if (i < count) sums[i] = carry + inclusive - value;
    carry += FromLane(inclusive, kWarpSize - 1);
  }
}

// The whole block. False: a peer runs another plan.
__device__ inline bool BuildTables(const PlanKernelParams& params, uint64_t sequence,
                                   ExpertTables& tables) {
  const DeviceRank& device = params.device;
  const uint32_t num_experts = device.shape.num_experts;
  const uint32_t num_ranks = device.shape.num_ranks;
  __shared__ uint32_t is_same_plan;
  if (threadIdx.x == 0) is_same_plan = 1;
  SyncBlock();
  for (uint32_t source = threadIdx.x; source < num_ranks; source += kThreads) {
    const auto& header = *OwnHeapAt<PlanHeader>(device, CountsOf(device, sequence, source));
    if (header.num_tokens == static_cast<int32_t>(params.num_tokens) &&
        header.recv_rows == params.recv_rows &&
        header.layout == static_cast<uint16_t>(params.layout) && header.program == device.program) {
      continue;
    }
    is_same_plan = 0;
    Fail(device, FailureKind::kWrongOrder, Operation::kPlan, source,
         FlagValue(sequence, Operation::kPlan, device.program),
         FlagValue(sequence, Operation::kPlan, header.program));
  }
  for (uint32_t expert = threadIdx.x; expert < num_experts; expert += kThreads) {
    int32_t demand = 0;
    for (uint32_t source = 0; source < num_ranks; ++source) {
      if (source == device.rank) tables.before_own[expert] = demand;
      demand += OwnHeapAt<int32_t>(device,
                                   CountsOf(device, sequence, source) + sizeof(PlanHeader))[expert];
    }
    tables.demand[expert] = demand;
  }
  SyncBlock();
  tables.Find(params);
  if (WarpId() == kWarps - 1) {
    const int32_t* own =
        OwnHeapAt<int32_t>(device, CountsOf(device, sequence, device.rank) + sizeof(PlanHeader));
    WarpExclusiveSums(num_experts, tables.list_begin, [&](uint32_t e) { return own[e]; });
  }
  SyncBlock();
  return is_same_plan != 0;
}

__device__ inline void PlaceBlock(const PlanKernelParams& params, const ExpertTables& tables) {
  const DeviceRank& device = params.device;
  const uint32_t num_experts = device.shape.num_experts;
  const uint32_t experts = device.shape.experts_per_rank();
  const auto top_k = device.shape.top_k;
  const int32_t* pair_ranks = OwnHeapAt<int32_t>(device, device.layout.pair_ranks);
  const int32_t* block_offsets = OwnHeapAt<int32_t>(device, device.layout.block_offsets) +
                                 static_cast<uint64_t>(blockIdx.x) * num_experts;
  int32_t* list = OwnHeapAt<int32_t>(device, device.layout.plan_list);
  const bool is_rank_major = params.layout == Layout::kRankMajor;
  const PairRange range = PairsOfWarp(params, blockIdx.x);
  for (uint32_t first = range.begin + LaneId(); first < range.end; first += kBatch * kWarpSize) {
    int32_t ranks[kBatch], ids[kBatch], offsets[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t pair = first + i * kWarpSize;
      ranks[i] = pair < range.end ? pair_ranks[pair] : -1;
      ids[i] = pair < range.end ? params.topk_idx[pair] : 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) offsets[i] = ranks[i] >= 0 ? block_offsets[ids[i]] : 0;
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t pair = first + i * kWarpSize;
      if (pair >= range.end) continue;
      if (ranks[i] < 0) {
        params.out.send_slot[pair] = -1;
        if (is_rank_major) list[pair] = -1;
        continue;
      }
      const int32_t expert = ids[i];
      const int32_t own_position = offsets[i] + ranks[i];
      const int32_t position = tables.before_own[expert] + own_position;
      const int32_t owner = expert / static_cast<int32_t>(experts);
      const auto source_row = static_cast<int32_t>(device.rank * params.num_tokens + pair / top_k);
      int32_t slot = owner * params.recv_rows +
                     (is_rank_major ? source_row : tables.zone_begin[expert] + position);
      if (params.mode == Mode::kLl) {
        slot =
            owner * static_cast<int32_t>(device.shape.num_ranks * params.num_tokens) + source_row;
      }
      params.out.send_slot[pair] =
          position < tables.Capacity(params, static_cast<uint32_t>(expert)) ? slot : -1;
      // rank_major drops nothing, and its receivers want expert ids by token, not a sorted list.
      if (is_rank_major) {
        list[pair] = expert;
      } else {
        list[tables.list_begin[expert] + own_position] = static_cast<int32_t>(pair);
      }
    }
  }
}

// The last block: all outputs that follow from the counts, and the segments for FillRecvSrc.
__device__ inline void WriteCounts(const PlanKernelParams& params, uint64_t sequence,
                                   const ExpertTables& tables) {
  const DeviceRank& device = params.device;
  const uint32_t num_experts = device.shape.num_experts;
  const uint32_t num_ranks = device.shape.num_ranks;
  const uint32_t experts = device.shape.experts_per_rank();
  const uint32_t own_first = device.rank * experts;
  const auto counts_of = [&](uint32_t source) {
    return OwnHeapAt<int32_t>(device, CountsOf(device, sequence, source) + sizeof(PlanHeader));
  };
  for (uint32_t e = threadIdx.x; e < experts; e += kThreads) {
    const int32_t capacity = tables.Capacity(params, own_first + e);
    params.out.group_counts[e] = capacity;
    params.out.group_sizes[e] =
        params.layout == Layout::kExpertMajor ? tables.zone[own_first + e] : capacity;
    if (params.counts_load) {
      CountUp(OwnHeapAt<uint64_t>(device, device.layout.pairs_per_expert) + e,
              static_cast<uint64_t>(capacity));
    }
  }
  // Sums by warp: destinations, then sources.
  for (uint32_t i = WarpId(); i < 2 * num_ranks; i += kWarps) {
    const bool is_source = i >= num_ranks;
    const uint32_t peer = is_source ? i - num_ranks : i;
    const uint32_t source = is_source ? peer : device.rank;
    const int32_t* counts = counts_of(source);
    const uint32_t first = is_source ? own_first : peer * experts;
    int32_t sum = 0;
    for (uint32_t e = LaneId(); e < experts; e += kWarpSize) {
      const uint32_t expert = first + e;
      int32_t before = 0;
      for (uint32_t lower = 0; lower < source; ++lower) before += counts_of(lower)[expert];
      const int32_t count = counts[expert];
      const int32_t kept = Clamp(tables.Capacity(params, expert) - before, count);
      sum += kept;
      if (!is_source) continue;
      const int32_t capacity = tables.Capacity(params, expert);
      OwnHeapAt<PlanSegment>(device, device.layout.segments)[e * num_ranks + source] = {
          tables.zone_begin[expert] + (before < capacity ? before : capacity), kept, 0, 0};
    }
    sum = WarpSum(sum);
    if (LaneId() == 0) (is_source ? params.out.recv_counts : params.out.send_counts)[peer] = sum;
    if (!is_source) continue;
    SyncWarp();
    // Where the source's own list has them: after its pairs of all lower experts.
    int32_t carry = 0;
    for (uint32_t expert = LaneId(); expert < own_first; expert += kWarpSize) {
      carry += counts[expert];
    }
    carry = WarpSum(carry);
    for (uint32_t base = 0; base < experts; base += kWarpSize) {
      const uint32_t e = base + LaneId();
      const int32_t count = e < experts ? counts[own_first + e] : 0;
      const int32_t inclusive = WarpInclusiveSum(count);
      if (e < experts) {
        OwnHeapAt<PlanSegment>(device, device.layout.segments)[e * num_ranks + source].list_begin =
            carry + inclusive - count;
      }
      carry += FromLane(inclusive, kWarpSize - 1);
    }
  }
  __shared__ int32_t num_dropped, has_drops;
  if (threadIdx.x == 0) {
    num_dropped = 0;
    has_drops = 0;
  }
  SyncBlock();
  int32_t dropped = 0;
  bool overflows = false;
  for (uint32_t expert = threadIdx.x; expert < num_experts; expert += kThreads) {
    const int32_t count = counts_of(device.rank)[expert];
    const int32_t capacity = tables.Capacity(params, expert);
    dropped += count - Clamp(capacity - tables.before_own[expert], count);
    overflows |= capacity < tables.demand[expert];
  }
  for (uint32_t source = threadIdx.x; source < num_ranks; source += kThreads) {
    const auto& header = *OwnHeapAt<PlanHeader>(device, CountsOf(device, sequence, source));
    overflows |= header.num_locally_dropped > 0;
    if (source == device.rank) dropped += header.num_locally_dropped;
  }
  if (dropped > 0) atomicAdd(&num_dropped, dropped);
  if (overflows) has_drops = 1;
  SyncBlock();
  if (threadIdx.x != 0) return;
  *params.out.num_dropped = num_dropped;
  *params.out.overflow = has_drops;
  CountPlan(device, num_dropped, has_drops != 0);
}

}  // namespace jax_ep::gpu::planning
