// kernels/gpu/ll/plan: the plan inside a routed ll dispatch, made by each receiving block.
//   In: the expert ids of all ranks, as tagged words. Out: PlanArrays, the index of own tokens.
//   Waits: each block for the ids of all ranks (rank_major: of its tokens), no block for another.
//
// What the plans of a routed LL dispatch share. Every block that receives reads the ids that it
// needs and makes the plan for itself, so that no block waits for another; it writes the outputs of
// its own tokens, and the first block the totals, for which it waits for all ids.
#pragma once

#include "kernels/gpu/ht/plan/pair_kind.cuh"
#include "kernels/gpu/ht/plan/plan_arrays.cuh"
#include "kernels/gpu/protocol/row_index.cuh"

namespace jax_ep::gpu {

struct LlPlanParams {
  Layout layout;
  uint32_t num_tokens;
  int32_t recv_rows;
  uint32_t num_histograms;  // warps that count; 0: LlBatchedPlanner
  PlanArrays out;
};

// (source, token) pairs are divided among the receiving blocks, in an order that interleaves
// sources.
struct TokenPartition {
  uint32_t num_ranks;
  uint32_t num_blocks;
  uint32_t block;  // num_blocks: it gets none
  bool writes_totals;

  // Of `num_items` pairs those of this block: the ordinals block, block + num_blocks, ...
  __device__ uint32_t ItemsOf(uint32_t num_items) const {
    return block == num_blocks || num_items <= block ? 0 : (num_items - block - 1) / num_blocks + 1;
  }

  // One of those by its number.
  struct Item {
    uint32_t source, token;
  };
  __device__ Item ItemAt(uint32_t number) const {
    const uint32_t ordinal = block + number * num_blocks;
    return {SourceOf(ordinal), ordinal / num_ranks};
  }
  __device__ uint32_t OrdinalOf(uint32_t source, uint32_t token) const {
    const uint32_t position = (source + num_ranks - Scatter(token) % num_ranks) % num_ranks;
    return token * num_ranks + position;
  }
  __device__ bool IsMine(uint32_t source, uint32_t token) const {
    return OrdinalOf(source, token) % num_blocks == block;
  }
  __device__ uint32_t SourceOf(uint32_t ordinal) const {
    return (ordinal % num_ranks + Scatter(ordinal / num_ranks) % num_ranks) % num_ranks;
  }
};

// Counts of the group's pairs. In shared memory, for the whole block.
struct LlPlanTotals {
  int32_t send_counts[kMaxRanks];
  int32_t recv_counts[kMaxRanks];
  int32_t num_dropped, num_invalid, overflow;

  __device__ void Clear() {
    for (uint32_t i = threadIdx.x; i < kMaxRanks; i += blockDim.x) {
      send_counts[i] = recv_counts[i] = 0;
    }
    if (threadIdx.x == 0) num_dropped = num_invalid = overflow = 0;
  }
  // One thread for a pair. is_kept: it is placed, and its expert, of `owner`, has room for it.
  __device__ void Count(const DeviceRank& device, PairKind kind, bool is_kept, uint32_t source,
                        uint32_t owner) {
    if (kind == PairKind::kAbsent) return;
    const bool is_own_source = source == device.rank;
    if (is_kept) {
      if (owner == device.rank) atomicAdd(&recv_counts[source], 1);
      if (is_own_source) atomicAdd(&send_counts[owner], 1);
      return;
    }
    overflow = 1;
    if (is_own_source) atomicAdd(&num_dropped, 1);
    if (is_own_source && kind == PairKind::kInvalid) atomicAdd(&num_invalid, 1);
  }
  // count_of(e), zone_of(e): rows of this rank's expert e, and those that are kept for it.
  template <typename CountOf, typename ZoneOf>
  __device__ void Write(const DeviceRank& device, const LlPlanParams& params, CountOf&& count_of,
                        ZoneOf&& zone_of) const {
    for (uint32_t e = threadIdx.x; e < device.shape.experts_per_rank(); e += blockDim.x) {
      params.out.group_counts[e] = count_of(e);
      params.out.group_sizes[e] = zone_of(e);
      CountUp(OwnHeapAt<uint64_t>(device, device.layout.pairs_per_expert) + e,
              static_cast<uint64_t>(count_of(e)));
    }
    for (uint32_t peer = threadIdx.x; peer < device.shape.num_ranks; peer += blockDim.x) {
      params.out.send_counts[peer] = send_counts[peer];
      params.out.recv_counts[peer] = recv_counts[peer];
    }
    if (threadIdx.x != 0) return;
    *params.out.num_dropped = num_dropped;
    *params.out.overflow = overflow;
    Control* control = ControlOf(device);
    control->plans += 1;
    control->rows_dropped += static_cast<uint64_t>(num_dropped);
    control->last_overflow = static_cast<uint64_t>(overflow);
    control->invalid_ids += static_cast<uint64_t>(num_invalid);
    if (device.debug && num_invalid > 0) {
      Fail(device, FailureKind::kInvalidId, Operation::kLlDispatch, device.rank, 0,
           static_cast<uint64_t>(num_invalid));
    }
  }
};

}  // namespace jax_ep::gpu
