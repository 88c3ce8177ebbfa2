// The receivers of an LL dispatch (ll_dispatch.cu).
#pragma once

#include "kernels/gpu/lanes/ll_place.cuh"
#include "kernels/gpu/ll/dispatch/place_bulk.cuh"
#include "kernels/gpu/ll/plan/batched_plan.cuh"
#include "kernels/gpu/ll/plan/plan.cuh"
#include "kernels/gpu/ll/plan/rank_major_plan.cuh"

namespace jax_ep::gpu::ll {

// All threads of one block: fails the rank if a peer runs another call.
__device__ inline void CheckHeaders(const LlDispatchKernelParams& params, const CallSlot& slot,
                                    const SourceWords& words) {
  const DeviceRank& device = params.device;
  const PushHeader expected = HeaderOf(params, params.start_operation, slot.program);
  const uint32_t count = device.shape.num_ranks * PushHeader::kNumWords;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const uint32_t source = i / PushHeader::kNumWords;
    const uint32_t number = i % PushHeader::kNumWords;
    if (source == device.rank) continue;
    const auto word = static_cast<int32_t>(words.HeaderWord(source, number));
    if (number == PushHeader::kRecvRows && word == 0) continue;
    int32_t wanted = 0;
#pragma unroll
    for (uint32_t j = 0; j < PushHeader::kNumWords; ++j) {  // an index into registers
      if (j == number) wanted = expected.words[j];
    }
    if (word == wanted || HasFailed(device)) continue;
    Fail(device, FailureKind::kWrongOrder, params.operation, source, static_cast<uint64_t>(wanted),
         static_cast<uint64_t>(word));
  }
}

// A warp of those that fill what no pair does.
struct RowShare {
  uint32_t num_warps;
  uint32_t warp;
};

// One warp. Rows of expert_major and expert_batched that no pair fills: its share; in the first
// round of those that move rows.
template <typename Word, typename IsUsed>
__device__ void FillUnused(const LlDispatchKernelParams& params, const RowShare& share,
                           IsUsed&& is_used) {
  const auto num_rows = static_cast<uint64_t>(params.plan.recv_rows);
  const uint64_t step = static_cast<uint64_t>(share.num_warps) * kWarpSize;
  int32_t num_used = 0;
  for (uint64_t first = static_cast<uint64_t>(share.warp) * kWarpSize; first < num_rows;
       first += step) {
    const uint64_t row = first + LaneId();
    const bool is_unused = row < num_rows && !is_used(row);
    num_used += row < num_rows && !is_unused;
    if (is_unused) {
      if (params.is_routed) params.plan.out.recv_src[row] = -1;
      if (params.recv_weights != nullptr) params.recv_weights[row] = 0.0f;
      if (params.recv_dots != nullptr) params.recv_dots[row] = 0.0f;
    }
    if (!params.zero_padding || params.recv_x == nullptr) continue;
    const LaneMask unused = Ballot(is_unused);
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
      if ((unused >> lane & 1) == 0) continue;
      WarpZeroWords<Word>(params.recv_x + (first + lane) * params.row_bytes, {0, params.row_words});
      ZeroScales(params.format, params.scales, first + lane);
    }
  }
  num_used = WarpSum(num_used);
  if (LaneId() == 0 && num_used > 0 && !params.round.is_plan_alone) {
    CountUp(&ControlOf(params.device)->rows_received, num_used);
  }
}

template <typename Rows>
__device__ void Receive(const LlDispatchKernelParams& params, const CallSlot& slot,
                        PlacedRows* items) {
  const DeviceRank& device = params.device;
  const uint32_t num_before = params.num_send_blocks + params.num_take_blocks;
  const uint32_t number = blockIdx.x - num_before;
  const uint32_t num_totals_blocks = params.has_totals_block ? 1 : 0;
  const bool is_totals_block = number < num_totals_blocks;
  const uint32_t num_blocks = gridDim.x - num_before - num_totals_blocks;
  const TokenPartition partition{.num_ranks = device.shape.num_ranks,
                                 .num_blocks = num_blocks,
                                 .block = is_totals_block ? num_blocks : number - num_totals_blocks,
                                 .writes_totals = number == 0};
  const RowIndex index(device, slot.sequence, params.plan.num_tokens);
  const bool is_rank_major = params.plan.layout == Layout::kRankMajor;
  using Word = typename Rows::Word;
  const SourceWords words(params, slot);
  // Warps that place rows with bulk copies have no time for padding, unless there is much of it.
  const bool fills_aside = params.num_place_warps > 0 && !params.zero_padding;
  const auto fill_unused = [&](auto&& is_used) {
    const uint32_t first = fills_aside ? params.num_place_warps : 0;
    if (is_rank_major || is_totals_block || WarpId() < first || params.round.first_token > 0)
      return;
    const RowShare share{.num_warps = (kWarps - first) * num_blocks,
                         .warp = (WarpId() - first) * num_blocks + partition.block};
    FillUnused<Word>(params, share, is_used);
  };
  if (partition.writes_totals) CheckHeaders(params, slot, words);
  if (params.is_routed) {
    __shared__ LlPlanTotals totals;
    const auto plan = [&](auto planner) {
      planner.Run(index, totals);
      SyncBlock();
      fill_unused([&](uint64_t row) { return planner.IsUsed(row); });
    };
    if (is_rank_major) {
      LlRankMajorPlanner(device, params.plan, partition, words, shared_ints).Run(index, totals);
      SyncBlock();
    } else if (params.plan.num_histograms == 0) {
      plan(LlBatchedPlanner(device, params.plan, partition, words, shared_ints));
    } else {
      plan(LlPlanner(device, params.plan, partition, words, shared_ints));
    }
  } else {
    IndexRows(device, index, params.round, params.plan.num_tokens, params.plan.out.recv_src,
              static_cast<uint64_t>(params.plan.recv_rows),
              [&](uint32_t source, uint32_t token) { return partition.IsMine(source, token); });
    SyncBlock();
    fill_unused([&](uint64_t row) {
      RowPair pair;
      return PairOf(device.shape, params.round.call_tokens, params.plan.out.recv_src[row], &pair);
    });
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (Rows::kFitBulkCopies) {
    if (params.num_place_warps > 0) {
      Rows::PlaceInBulk(params, slot, words, partition, index, items[WarpId()]);
      return;
    }
  }
#endif
  PlaceItems<Rows>(params, slot, words, partition, index, items[WarpId()]);
}

__device__ inline void Poison(const LlDispatchKernelParams& params) {
  const GroupShape& shape = params.device.shape;
  const auto rows = static_cast<uint64_t>(params.plan.recv_rows);
  const bool is_rank_major = params.plan.layout == Layout::kRankMajor;
  const uint64_t cells = rows * (is_rank_major ? shape.top_k : 1);
  PoisonBytes(params.recv_x, rows * params.row_bytes);
  PoisonBytes(params.recv_weights, cells * sizeof(float));
  PoisonBytes(params.recv_dots, rows * sizeof(float));
  PoisonBytes(params.scales.scales,
              rows * params.format.num_blocks() * params.format.scale_bytes());
  if (!params.is_routed && !params.round.is_planned) return;
  PoisonPlan(shape, params.plan.layout,
             static_cast<uint64_t>(params.round.call_tokens) * shape.top_k, rows, params.plan.out);
}

}  // namespace jax_ep::gpu::ll
