// HT combine with bulk copies. The protocol is that of combine_rows.cu; what differs is who does
// what.
//
// A block is made of teams. A team's rows stream through a ring in shared memory, many in flight:
//   scheduler  takes chunks: partials for other owners in the order that all ranks share, or the
//              sums of this rank's own tokens, for whose partials it waits; it writes batches of
//              commands, one per piece of a row, in the order in which they are summed;
//   loader     turns commands into bulk loads, a few rows of a sum at once, as the ring's slots
//              become free;
//   reducers   each have their share of a piece in registers, add row after row, and store the
//              result where the last command of a sum says;
//   publisher  sends a chunk's flag when the reducers have stored it.
// The blocks that start first make partials as long as there are any, then sums; the others sums,
// then partials. Summing waits for flags. Computing a partial never waits, and no partial that is
// taken queues behind sums that wait, so every flag comes.
#include <algorithm>

#include "kernels/gpu/ht/combine/reducer.cuh"
#include "kernels/gpu/ht/combine/scheduler.cuh"
#include "kernels/gpu/ht/combine/team.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/sm_budget.h"

namespace jax_ep::gpu {

#if JAX_EP_BULK_COPIES
namespace {

using namespace team;

template <typename Elem, typename Partial, uint32_t kLaneElems, uint32_t kDepth>
__global__ void __launch_bounds__(kMaxThreads, 1)
    CombineRowsInBulk(const __grid_constant__ CombineKernelParams params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ uint32_t shared_flag, order;
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  const uint32_t team_warps = params.reducers + kRoles;
  const uint32_t warp = WarpId() % team_warps;
  const uint32_t team_number = WarpId() / team_warps;
  TeamState& team = TeamOf(params, team_number);
  InitTeam(params, team, warp, team_warps);
  // By their own order: nothing says which blocks of a grid run first.
  if (threadIdx.x == kWarpSize) order = atomicAdd(&ControlOf(device)->blocks_started, 1u);
  if (Enter(device, params.entry, sequence)) {
    if (warp < params.reducers) {
      Reducer<Elem, Partial, kLaneElems, kDepth>(params, team, warp).Run();
    } else if (warp == params.reducers) {
      IssueLoads(params, team);
    } else if (warp == params.reducers + 1) {
      const bool makes_partials_first =
          order < params.partial_blocks && team_number < params.partial_teams;
      Scheduler<Elem, Partial>(params, sequence, team, makes_partials_first).Run();
    } else if (LaneId() == 0) {
      SendFlags(params, sequence, team);
    }
  }
  FinishCombine(params, sequence, &shared_flag);
#endif
}

using Kernel = void (*)(CombineKernelParams);

struct Variant {
  Kernel kernel;
  uint32_t lane_elems;  // of a piece, per lane of a reducer
};

// Twice the elements per lane are half the instructions that are no additions, and two teams where
// there was one. There are registers for that with few ranks, of whose sums few wait.
template <typename Elem, typename Partial>
Variant VariantOf(uint32_t num_ranks) {
  static_assert(kMaxNodeRanks <= 1u << 6);
  constexpr uint32_t kManyElems = 64 / sizeof(typename Elem::Storage);
  if (num_ranks <= 1u << 2) {
    return {&CombineRowsInBulk<Elem, Partial, kManyElems, 1>, kManyElems};
  }
  if (num_ranks <= 1u << 3) return {&CombineRowsInBulk<Elem, Partial, 16, 2>, 16};
  return {&CombineRowsInBulk<Elem, Partial, 16, 5>, 16};
}

Variant VariantOf(const GroupShape& shape) {
  return WithSumTypes(shape, [&]<typename Elem, typename Partial>() {
    return VariantOf<Elem, Partial>(shape.num_ranks);
  });
}

}  // namespace

const char* PrepareCombineRowsInBulk(const RankHandle& rank) {
  return PrepareKernel(VariantOf(rank.device.shape).kernel, rank.shared_bytes_per_block);
}

const char* LaunchCombineRowsInBulk(RankHandle& rank, const CombineKernelParams& call,
                                    cudaStream_t stream) {
  CombineKernelParams params = call;
  const GroupShape& shape = rank.device.shape;
  const uint64_t elem_bytes =
      shape.f32_partials ? sizeof(float) : static_cast<uint64_t>(ElemBytes(shape.elem_type));
  constexpr uint64_t kElemUnit = 8;  // a 16-byte word of the smallest type
  const Variant variant = VariantOf(shape);
  const uint32_t warp_elems = variant.lane_elems * kWarpSize;
  const uint64_t num_pieces = DivideUp(shape.hidden, kMaxPieceElems);
  params.piece_elems =
      static_cast<uint32_t>(AlignUp(DivideUp(shape.hidden, num_pieces), kElemUnit));
  params.reducers = static_cast<uint32_t>(DivideUp(params.piece_elems, warp_elems));
  params.num_teams = std::min(kMaxWarps / (params.reducers + kRoles), kMaxTeams);
  // Reducers read all their words, whatever the piece has.
  params.slot_bytes = params.reducers * warp_elems * static_cast<uint32_t>(elem_bytes);
  constexpr uint32_t kHeadBytes = TeamHeadBytes();
  const uint32_t share = rank.shared_bytes_per_block / params.num_teams;
  // Fewer than there are barriers, so that a group's are free when its slots are.
  params.ring_slots = std::min((share - kHeadBytes) / params.slot_bytes, kGroups - 1);
  constexpr uint32_t kFewestGroups = 3;
  params.group_rows = std::clamp(params.ring_slots / kFewestGroups, 1u, kMaxGroupRows);
  params.team_bytes = kHeadBytes + params.ring_slots * params.slot_bytes;
  const uint64_t num_tasks = static_cast<uint64_t>(params.num_chunks) * shape.num_ranks;
  const uint32_t blocks = BlocksFor(num_tasks, params.num_teams, params.max_blocks);
  params.partial_blocks = PartialBlocks(
      blocks, params.num_teams * params.reducers * warp_elems * ElemBytes(shape.elem_type),
      RowsPerPartial(shape, params.num_tokens, params.mean_rows));
  params.partial_teams = PartialTeams(num_tasks - params.num_chunks, blocks, params.num_teams);
  const uint32_t num_threads = params.num_teams * (params.reducers + kRoles) * kWarpSize;
  variant.kernel<<<blocks, num_threads, params.num_teams * params.team_bytes, stream>>>(params);
  return LaunchResult("CombineRowsInBulk");
}

#endif

}  // namespace jax_ep::gpu
