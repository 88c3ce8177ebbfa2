// plan: kernels on the stream. No atomics that decide an order, so equal inputs give equal plans.
//
// In one kernel with one exchange, where every rank can read the pairs of all (plan_slices.h):
//
//   PlanBySlices  blocks number the pairs of a slice each by expert, and send their counts to every
//                 rank (slice flag); all wait for all counts and read the pairs of all ranks; all
//                 outputs.
//
// One block of a rank must be enough for it to end: one that has waited for a moment first counts
// what is missing of its own rank, which waits for nobody, and only then waits for peers, whose
// blocks do the same.
//
// Counts and pairs have two sets: a rank that begins such a plan n + 2 has ended n + 1, whose
// counts its peers sent when they had ended n, with all of their blocks.
//
// In three steps else, in which every rank reads of the others' pairs only those for its experts:
//
//   CountPairs    each block numbers the pairs of its part by expert; the last block adds the
//                 blocks up and sends the counts [E] of this rank to every peer (entry flag).
//   PlaceOwnPairs waits for all counts; zones of every rank; send_slot and the counts of the plan;
//                 this rank's codes sorted by expert (list flag).
//   FillRecvSrc   waits for all lists; recv_src, recv_topk_idx.
//
// Over several nodes two more (network/plan.cu) exchange counts and lists with ranks of other
// nodes.
//
// Reuse without another barrier: counts have two sets. A rank that sends counts of operation n + 2
// has ended n + 1, whose entry or list flags its peers sent after their last read of set n. A list
// is written again after all peers' counts of that plan, which they send when their last one is
// over.
#include <algorithm>

#include "kernels/gpu/checks.h"
#include "kernels/gpu/ht/plan/count_pairs.cuh"
#include "kernels/gpu/ht/plan/fill_recv_src.cuh"
#include "kernels/gpu/ht/plan/place_own_pairs.cuh"
#include "kernels/gpu/ht/plan/place_slices.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/network/launchers.h"
#include "kernels/gpu/protocol/open_end.cuh"

namespace jax_ep::gpu {
namespace {

using namespace planning;

// One warp. Nobody waits for these flags; a peer that waits for this rank in a dispatch or combine
// finds by them that it is in a plan.
__device__ void SayInPlan(const DeviceRank& device, uint64_t sequence) {
  const uint64_t value = FlagValue(sequence, Operation::kPlan, device.program);
  for (uint32_t peer = device.node_begin + LaneId(); peer < MatesEnd(device); peer += kWarpSize) {
    if (peer == device.rank) continue;
    StoreRelaxedSys(
        HeapAt<uint64_t>(device, peer, device.layout.entry_flags) + SenderTo(device, peer), value);
  }
}

__global__ void __launch_bounds__(kThreads)
    PlanBySlices(const __grid_constant__ PlanKernelParams params) {
  __shared__ uint32_t shared_flag;
  const DeviceRank& device = params.device;
  const uint32_t first = SlicePlacer::FirstSlice();
  ExpertBatch batch = ExpertBatch::First(params, first);
  const uint64_t sequence = SequenceOf(device);
  const uint64_t plans = ControlOf(device)->sliced_plans;
  const uint64_t set = plans % 2;
  const OpenEnd end(device);
  SliceClaim claim(params, sequence, first, false);
  // All wait for the counts, so the block that begins with no slice does what is to be done
  // besides.
  if (blockIdx.x == 0 && threadIdx.x == 0) TakeBusyWord(device, Operation::kPlan);
  if (blockIdx.x == 0 && threadIdx.x == 2 * kWarpSize) FailAfterPeer(device, Operation::kPlan);
  if (threadIdx.x == kWarpSize) shared_flag = SawFailure(device) ? 0 : 1;  // one for the block
  SyncBlock();
  if (shared_flag != 0) {
    if (blockIdx.x == 0 && WarpId() == kWarps - 1) SayInPlan(device, sequence);
    SlicePlacer placer(params, sequence, set, shared_ints);
    uint32_t slices = 0;  // a bit for each
    for (uint32_t slice = first; slice < params.num_blocks; slice += SlicePlacer::NumWorkers()) {
      slices |= 1u << slice;
    }
    for (bool is_late = false;; is_late = true) {
      for (; slices != 0; slices &= slices - 1) {
        const uint32_t slice = static_cast<uint32_t>(__ffs(static_cast<int>(slices))) - 1;
        if (is_late || slice != first) {
          batch = ExpertBatch::First(params, slice);
          claim = SliceClaim(params, sequence, slice, is_late);
        }
        CountSlice(params, sequence, set, slice, batch, claim);
        SyncBlock();  // the histograms can be cleared
      }
      if (is_late) break;
      slices = placer.MissingSlices();
      if (slices == 0) break;
    }
    placer.Run();
  }
  const auto write = [&] { ControlOf(device)->sliced_plans = plans + 1; };
  const auto poison = [&] {
    PoisonPlan(device.shape, params.layout, params.num_pairs,
               static_cast<uint64_t>(params.recv_rows), params.out);
  };
  if (HasOpenEnd(device, CallPart::kWhole)) return end.Finish(sequence, write, poison);
  if (!LastToArrive(device, &shared_flag)) return;
  if (threadIdx.x == 0) {
    write();
    EndOperation(device, sequence);
  }
  if (HasFailed(device)) poison();
}

__global__ void __launch_bounds__(kThreads)
    CountPairs(const __grid_constant__ PlanKernelParams params) {
  __shared__ uint32_t shared_flag;
  const DeviceRank& device = params.device;
  if (blockIdx.x == 0 && threadIdx.x == 0) TakeBusyWord(device, Operation::kPlan);
  if (threadIdx.x == kWarpSize)
    shared_flag = HasFailed(device) ? 0 : 1;  // one answer for the block
  SyncBlock();
  if (shared_flag != 0) CountOwnBlock(params);  // else the heap may be gone
  if (!LastToArrive(device, &shared_flag) || HasFailed(device)) return;
  PublishCounts(params, SequenceOf(device));
}

__global__ void __launch_bounds__(kThreads)
    PlaceOwnPairs(const __grid_constant__ PlanKernelParams params) {
  __shared__ uint32_t shared_flag;
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  ExpertTables tables(shared_ints, device.shape.num_experts);
  bool is_ok = BlockWaitPeers(device, device.layout.entry_flags, Operation::kPlan,
                              FlagValue(sequence, Operation::kPlan, device.program), &shared_flag);
  if (is_ok) is_ok = BuildTables(params, sequence, tables);
  if (is_ok) {
    if (blockIdx.x < params.num_blocks) PlaceBlock(params, tables);
    if (blockIdx.x == gridDim.x - 1) WriteCounts(params, sequence, tables);
  }
  if (!LastToArrive(device, &shared_flag) || HasFailed(device)) return;
  BlockSignalMates(device, device.layout.list_flags,
                   FlagValue(sequence, Operation::kPlan, device.program));
}

__global__ void __launch_bounds__(kThreads)
    FillRecvSrc(const __grid_constant__ PlanKernelParams params) {
  __shared__ uint32_t shared_flag;
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  if (BlockWaitPeers(device, device.layout.list_flags, Operation::kPlan,
                     FlagValue(sequence, Operation::kPlan, device.program), &shared_flag)) {
    params.layout == Layout::kRankMajor ? FillRankMajor(params) : FillFromLists(params);
  }
  if (!LastToArrive(device, &shared_flag)) return;
  if (HasFailed(device)) {
    PoisonPlan(device.shape, params.layout, params.num_pairs,
               static_cast<uint64_t>(params.recv_rows), params.out);
  }
  if (threadIdx.x == 0) EndOperation(device, sequence);
}

uint32_t TablesBytes(const GroupShape& shape) {
  const uint64_t tables = ExpertTables::kNumTables * sizeof(int32_t);
  return static_cast<uint32_t>(shape.num_experts * std::max<uint64_t>(tables, sizeof(PlanSegment)));
}

uint32_t NumHistograms(const RankHandle& rank) {
  const uint32_t bytes = rank.device.shape.num_experts * static_cast<uint32_t>(sizeof(int32_t));
  return std::min(kWarps, rank.shared_bytes_per_block / bytes);
}

}  // namespace

const char* PreparePlanKernels(const RankHandle& rank) {
  const GroupShape& shape = rank.device.shape;
  const uint32_t tables = TablesBytes(shape);
  if (NumHistograms(rank) == 0 || tables > rank.shared_bytes_per_block) {
    return KeepText("got " + std::to_string(shape.num_experts) +
                    " experts, more than this device's shared memory has room for");
  }
  // Of any call: one of fewer experts (a view's) may have room for more histograms.
  if (const char* error = PrepareKernels(rank.shared_bytes_per_block, &CountPairs, &PlanBySlices)) {
    return error;
  }
  return PrepareKernels(tables, &PlaceOwnPairs, &FillRecvSrc);
}

const char* LaunchPlan(RankHandle& rank, const PlanParams& plan, cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  if (std::string wrong = CheckPlan(shape, plan); !wrong.empty()) {
    return KeepText("plan: " + std::move(wrong));
  }
  PlanKernelParams params{.device = rank.device,
                          .layout = plan.layout,
                          .mode = plan.mode,
                          .counts_load = plan.counts_load,
                          .num_tokens = static_cast<uint32_t>(plan.num_tokens),
                          .recv_rows = static_cast<int32_t>(plan.recv_rows),
                          .num_pairs = static_cast<uint32_t>(plan.topk_idx.size()),
                          .num_warps = NumHistograms(rank),
                          .by_experts_per_rank = Divisor(shape.experts_per_rank()),
                          .by_top_k = Divisor(shape.top_k),
                          .topk_idx = plan.topk_idx.data(),
                          .out = ArraysOf(plan.out)};
  const uint64_t max_blocks = std::min<uint64_t>(rank.max_blocks, kMaxPlanBlocks);
  const uint32_t histograms =
      params.num_warps * shape.num_experts * static_cast<uint32_t>(sizeof(int32_t));
  if (const PlanSlices slices = SlicesOf(shape, params.num_pairs); slices.count > 0) {
    // For a few microseconds; with fewer, blocks have several slices one after the other. One more
    // writes what follows from the counts.
    const uint32_t most = rank.has_budget ? std::min(kMostSms + 1, rank.num_sms) : rank.max_blocks;
    params.num_blocks = slices.count;
    params.pairs_per_block = slices.num_pairs;
    params.pairs_per_warp =
        static_cast<uint32_t>(DivideUp(params.pairs_per_block, params.num_warps));
    const uint32_t num_slices = slices.count * shape.num_ranks;
    PlanBySlices<<<BlocksFor(num_slices + 1, 1, most), kThreads,
                   std::max(histograms, SlicePlacer::SharedBytes(shape.num_experts, num_slices)),
                   stream>>>(params);
    return LaunchResult("PlanBySlices");
  }
  // One more block of PlaceOwnPairs writes what follows from the counts, where there may be one.
  const uint32_t extra_blocks = max_blocks > 1 ? 1 : 0;
  const uint32_t blocks = std::min(BlocksFor(params.num_pairs, kMinPairsPerBlock, max_blocks),
                                   static_cast<uint32_t>(max_blocks) - extra_blocks);
  params.num_blocks = blocks;
  const uint64_t num_parts = static_cast<uint64_t>(blocks) * params.num_warps;
  params.pairs_per_warp = static_cast<uint32_t>(DivideUp(params.num_pairs, num_parts));
  params.pairs_per_block = params.pairs_per_warp * params.num_warps;

  const uint32_t tables = TablesBytes(shape);
  CountPairs<<<blocks, kThreads, histograms, stream>>>(params);
  if (const char* error = LaunchResult("CountPairs")) return error;
  const bool has_network = shape.num_nodes() > 1;
  if (has_network) {
    if (const char* error = LaunchExchangeCounts(rank, stream)) return error;
  }
  PlaceOwnPairs<<<blocks + extra_blocks, kThreads, tables, stream>>>(params);
  if (const char* error = LaunchResult("PlaceOwnPairs")) return error;
  if (has_network) {
    if (const char* error = LaunchExchangeLists(rank, plan, stream)) return error;
  }
  const uint32_t fill_blocks =
      BlocksFor(static_cast<uint64_t>(plan.recv_rows), kThreads, max_blocks);
  FillRecvSrc<<<fill_blocks, kThreads, tables, stream>>>(params);
  return LaunchResult("FillRecvSrc");
}

}  // namespace jax_ep::gpu
