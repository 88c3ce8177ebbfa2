// First kernel of a plan in three steps: pairs by expert, numbered within their blocks, and the
// counts of this rank.
#pragma once

#include "kernels/gpu/ht/plan/pair_kind.cuh"
#include "kernels/gpu/ht/plan/params.cuh"

namespace jax_ep::gpu::planning {

__device__ inline PairKind Classify(const PlanKernelParams& params, uint32_t pair, int32_t expert) {
  const GroupShape& shape = params.device.shape;
  return KindOfPair(expert, shape.num_experts, [&] {
    if (params.layout != Layout::kExpertBatched) return false;
    const uint32_t first = pair / shape.top_k * shape.top_k;
    for (uint32_t other = first; other < pair; ++other) {
      if (params.topk_idx[other] == expert) return true;
    }
    return false;
  });
}

struct PairRange {
  uint32_t begin;
  uint32_t end;
};
__device__ inline PairRange PairsOfWarp(const PlanKernelParams& params, uint32_t block) {
  const uint64_t first = uint64_t{block} * params.pairs_per_block;
  const uint64_t end_of_block = min(first + params.pairs_per_block, uint64_t{params.num_pairs});
  if (WarpId() >= params.num_warps) return {};
  const uint64_t begin = first + WarpId() * uint64_t{params.pairs_per_warp};
  return {static_cast<uint32_t>(min(begin, end_of_block)),
          static_cast<uint32_t>(min(begin + params.pairs_per_warp, end_of_block))};
}

// What a lane counts at a time: of the warp's pairs those from `first` on, a warp's width apart.
struct ExpertBatch {
  int32_t experts[kBatch];  // -1: no pair

  // Starts to load.
  __device__ void Load(const PlanKernelParams& params, PairRange range, uint32_t first) {
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t pair = first + i * kWarpSize + LaneId();
      experts[i] = pair < range.end ? params.topk_idx[pair] : -1;
    }
  }
  __device__ static ExpertBatch First(const PlanKernelParams& params, uint32_t block) {
    const PairRange range = PairsOfWarp(params, block);
    ExpertBatch batch;
    batch.Load(params, range, range.begin);
    return batch;
  }
};

// Pairs without a place: dropped (repeated or invalid), and the invalid ones among them.
struct PairDrops {
  int32_t dropped, invalid;
};

// The claim to a part that no other block counts (else SliceClaim).
struct NoRival {
  __device__ bool IsDoubtful() const { return false; }
  __device__ void Settle() { SyncBlock(); }
  __device__ bool IsMine() const { return true; }
};

// All threads of the block number the pairs of the part `block`: those of one expert in their
// order. batch: the first ones, which may be on their way since long. numbers.Put(pair, expert,
// number) keeps a number, below 0 for a pair without a place; numbers.Add(pair, counts) adds
// counts[expert] to it. put_count(expert, count): for each expert. Unless the claim holds nothing
// is kept, and the result says nothing.
template <typename Claim, typename Numbers, typename PutCount>
__device__ PairDrops CountBlock(const PlanKernelParams& params, uint32_t block, ExpertBatch batch,
                                Claim&& claim, const Numbers& numbers, PutCount&& put_count) {
  const DeviceRank& device = params.device;
  const uint32_t num_experts = device.shape.num_experts;
  __shared__ int32_t block_drops[2];
  for (uint32_t i = threadIdx.x; i < params.num_warps * num_experts; i += kThreads) {
    shared_ints[i] = 0;
  }
  if (threadIdx.x < 2) block_drops[threadIdx.x] = 0;
  // One batch stays in registers until it is final: whose part it is may come out meanwhile.
  const bool is_one_batch = params.pairs_per_warp <= kBatch * kWarpSize;
  const bool must_know = !is_one_batch || claim.IsDoubtful();
  must_know ? claim.Settle() : SyncBlock();
  if (must_know && !claim.IsMine()) return {};

  const PairRange range = PairsOfWarp(params, block);
  int32_t* counts = shared_ints + static_cast<uint64_t>(WarpId()) * num_experts;
  int32_t num_dropped = 0;
  int32_t num_invalid = 0;
  int32_t (&experts)[kBatch] = batch.experts;
  int32_t ranks[kBatch];
  for (uint32_t first = range.begin; first < range.end; first += kBatch * kWarpSize) {
    if (first != range.begin) batch.Load(params, range, first);
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t pair = first + i * kWarpSize + LaneId();
      const PairKind kind =
          pair < range.end ? Classify(params, pair, experts[i]) : PairKind::kAbsent;
      if (kind != PairKind::kPlaced) experts[i] = -1;
      num_dropped += kind == PairKind::kDuplicate || kind == PairKind::kInvalid;
      num_invalid += kind == PairKind::kInvalid;
      const LaneMask same = LanesWithSame(experts[i]);
      const uint32_t lower = CountLanes(same & LanesBelow());
      const int32_t before = experts[i] >= 0 ? counts[experts[i]] : 0;
      SyncWarp();
      if (experts[i] >= 0 && lower == 0) {
        counts[experts[i]] = before + static_cast<int32_t>(CountLanes(same));
      }
      SyncWarp();
      ranks[i] = experts[i] >= 0 ? before + static_cast<int32_t>(lower) : -1;
      if (!is_one_batch && pair < range.end) numbers.Put(pair, experts[i], ranks[i]);
    }
  }
  num_dropped = WarpSum(num_dropped);
  num_invalid = WarpSum(num_invalid);
  if (LaneId() == 0 && num_dropped > 0) {
    atomicAdd(&block_drops[0], num_dropped);
    atomicAdd(&block_drops[1], num_invalid);
  }
  must_know ? SyncBlock() : claim.Settle();
  if (!must_know && !claim.IsMine()) return {};

  for (uint32_t expert = threadIdx.x; expert < num_experts; expert += kThreads) {
    int32_t sum = 0;
    for (uint32_t warp = 0; warp < params.num_warps; ++warp) {
      int32_t& cell = shared_ints[static_cast<uint64_t>(warp) * num_experts + expert];
      const int32_t count = cell;
      cell = sum;
      sum += count;
    }
    put_count(expert, sum);
  }
  const PairDrops drops = {block_drops[0], block_drops[1]};
  SyncBlock();
  if (is_one_batch) {
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t pair = range.begin + i * kWarpSize + LaneId();
      if (pair >= range.end) continue;
      numbers.Put(pair, experts[i], ranks[i] >= 0 ? ranks[i] + counts[experts[i]] : -1);
    }
    return drops;
  }
  for (uint32_t pair = range.begin + LaneId(); pair < range.end; pair += kWarpSize) {
    numbers.Add(pair, counts);
  }
  return drops;
}

// pair_ranks.
struct PairRanks {
  const PlanKernelParams& params;
  int32_t* of_pair;

  __device__ void Put(uint32_t pair, int32_t, int32_t number) const { of_pair[pair] = number; }
  __device__ void Add(uint32_t pair, const int32_t* counts) const {
    if (of_pair[pair] >= 0) of_pair[pair] += counts[params.topk_idx[pair]];
  }
};

// Writes pair_ranks, block_counts and block_drops of this block.
__device__ inline void CountOwnBlock(const PlanKernelParams& params) {
  const GpuHeapLayout& layout = params.device.layout;
  const PairRanks ranks{params, OwnHeapAt<int32_t>(params.device, layout.pair_ranks)};
  int32_t* counts = OwnHeapAt<int32_t>(params.device, layout.block_counts) +
                    static_cast<uint64_t>(blockIdx.x) * params.device.shape.num_experts;
  const PairDrops drops =
      CountBlock(params, blockIdx.x, ExpertBatch::First(params, blockIdx.x), NoRival{}, ranks,
                 [&](uint32_t expert, int32_t count) { counts[expert] = count; });
  if (threadIdx.x != 0) return;
  int32_t* to = OwnHeapAt<int32_t>(params.device, layout.block_drops) + blockIdx.x * 2;
  to[0] = drops.dropped;
  to[1] = drops.invalid;
}

// The last block: sums over the blocks, to every mate.
__device__ inline void PublishCounts(const PlanKernelParams& params, uint64_t sequence) {
  const DeviceRank& device = params.device;
  const uint32_t num_experts = device.shape.num_experts;
  const int32_t* block_counts = OwnHeapAt<int32_t>(device, device.layout.block_counts);
  int32_t* block_offsets = OwnHeapAt<int32_t>(device, device.layout.block_offsets);
  const auto counts_offset = [&](uint32_t peer) {
    return CountsOf(device, sequence, SenderTo(device, peer));
  };
  for (uint32_t expert = threadIdx.x; expert < num_experts; expert += kThreads) {
    int32_t sum = 0;
    constexpr uint32_t kBlocks = 24;  // loads in flight
    for (uint32_t first = 0; first < gridDim.x; first += kBlocks) {
      int32_t counts[kBlocks];
#pragma unroll
      for (uint32_t i = 0; i < kBlocks; ++i) {
        const uint32_t block = first + i;
        counts[i] = block < gridDim.x
                        ? block_counts[static_cast<uint64_t>(block) * num_experts + expert]
                        : 0;
      }
#pragma unroll
      for (uint32_t i = 0; i < kBlocks; ++i) {
        if (first + i >= gridDim.x) break;
        block_offsets[static_cast<uint64_t>(first + i) * num_experts + expert] = sum;
        sum += counts[i];
      }
    }
    for (uint32_t peer = device.node_begin; peer < MatesEnd(device); ++peer) {
      HeapAt<int32_t>(device, peer, counts_offset(peer) + sizeof(PlanHeader))[expert] =
          IsActive(device, peer) ? sum : 0;
    }
  }
  if (threadIdx.x == 0) {
    const int32_t* drops = OwnHeapAt<int32_t>(device, device.layout.block_drops);
    int32_t num_dropped = 0;
    int32_t num_invalid = 0;
    for (uint32_t block = 0; block < gridDim.x; ++block) {
      num_dropped += drops[block * 2];
      num_invalid += drops[block * 2 + 1];
    }
    ControlOf(device)->invalid_ids += static_cast<uint64_t>(num_invalid);
    if (device.debug && num_invalid > 0) {
      Fail(device, FailureKind::kInvalidId, Operation::kPlan, device.rank, 0,
           static_cast<uint64_t>(num_invalid));
    }
    PlanHeader header = {num_dropped, static_cast<int32_t>(params.num_tokens), params.recv_rows,
                         static_cast<uint16_t>(params.layout),
                         static_cast<uint16_t>(device.program)};
    for (uint32_t peer = device.node_begin; peer < MatesEnd(device); ++peer) {
      header.num_locally_dropped = IsActive(device, peer) ? num_dropped : 0;
      *HeapAt<PlanHeader>(device, peer, counts_offset(peer)) = header;
    }
  }
  SyncBlock();
  BlockSignalMates(device, device.layout.entry_flags,
                   FlagValue(sequence, Operation::kPlan, device.program));
}

}  // namespace jax_ep::gpu::planning
