// What the warps of a team of combine_rows_in_bulk.cu share, and where it is in shared memory.
#pragma once

#include "kernels/gpu/device/ring_position.cuh"
#include "kernels/gpu/ht/combine/combine.cuh"
#include "kernels/gpu/sums/sum_ops.h"

namespace jax_ep::gpu::team {

inline constexpr uint32_t kMaxWarps = 20;
inline constexpr uint32_t kMaxThreads = kMaxWarps * kWarpSize;
inline constexpr uint32_t kRoles = 3;             // warps of a team besides the reducers
inline constexpr uint32_t kMaxPieceElems = 7168;  // of a row, that one slot of the ring holds
inline constexpr uint32_t kMaxTeams = 4;
inline constexpr uint32_t kMaxGroupRows = 4;
inline constexpr uint32_t kGroups = 32;  // barriers of groups: a lane of the loader has one
// Batches that a scheduler has written ahead no other team can do, and at the end all wait for the
// last.
inline constexpr uint32_t kBatches = 1;
inline constexpr uint32_t kBatchCommands = 64;  // all pairs of a token, at least
inline constexpr uint32_t kTasks = 32;

// Rows of one sum that are loaded and added together; each has a slot of the ring.
struct alignas(16) Group {
  std::byte* to;
  uint32_t ops;  // of its last row; kBeginsSum: of its first
  uint16_t slot;
  uint16_t count;
};
struct alignas(16) GroupWeights {
  float of_row[kMaxGroupRows];
};
struct alignas(16) Command {
  const std::byte* from;
  std::byte* to;
  float weight;
  uint32_t ops;
  uint32_t num_bytes;
};
// Commands that go from the scheduler to the loader at once.
struct Batch {
  Command commands[kBatchCommands];
  uint32_t count;
  uint32_t needs_fence;  // peers wrote what is loaded from here on
  uint32_t stops;        // nothing follows
};
struct Task {
  uint32_t owner;  // kNone: no more
  uint32_t chunk;
};

// Of one team; the ring follows. All that goes from warp to warp is handed over by mbarriers: an
// arrival releases, a wait acquires, and unlike a release by a store an arrival does not wait for
// loads that are still in flight.
struct TeamState {
  uint64_t full[kGroups], empty[kGroups];                // loader, reducers
  uint64_t batch_full[kBatches], batch_empty[kBatches];  // scheduler, loader
  uint64_t task_summed[kTasks], task_sent[kTasks];       // reducers, publisher
  Group groups[kGroups];
  GroupWeights weights[kGroups];
  Batch batches[kBatches];
  Task tasks[kTasks];
  alignas(16) int32_t rows[kBatchCommands];    // of the batch's pairs
  alignas(16) int32_t leaves[kBatchCommands];  // of own tokens: of the pair's rank (tree.h), or -1
};

__host__ __device__ constexpr uint32_t TeamHeadBytes() {
  return static_cast<uint32_t>(AlignUp(sizeof(TeamState), 128));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr uint32_t kNone = ~0u;

extern __shared__ __align__(128) unsigned char shared_bytes[];

__device__ inline TeamState& TeamOf(const CombineKernelParams& params, uint32_t team) {
  return *reinterpret_cast<TeamState*>(shared_bytes +
                                       static_cast<uint64_t>(team) * params.team_bytes);
}
__device__ inline unsigned char* RingOf(TeamState& team) {
  return reinterpret_cast<unsigned char*>(&team) + TeamHeadBytes();
}

// Warp `warp` of the team's `num_warps`, before a SyncBlock. A barrier takes 30 ns, and lanes of a
// warp set theirs up one after the other, so all warps do.
__device__ inline void InitTeam(const CombineKernelParams& params, TeamState& team, uint32_t warp,
                                uint32_t num_warps) {
  if (LaneId() != 0) return;
  for (uint32_t i = warp; i < kGroups; i += num_warps) {
    BarrierInit(&team.full[i], kWarpArrivals);
    BarrierInit(&team.empty[i], params.reducers * kWarpArrivals);
  }
  for (uint32_t i = warp; i < kBatches; i += num_warps) {
    BarrierInit(&team.batch_full[i], kWarpArrivals);
    BarrierInit(&team.batch_empty[i], kWarpArrivals);
  }
  for (uint32_t i = warp; i < kTasks; i += num_warps) {
    BarrierInit(&team.task_summed[i], params.reducers * kWarpArrivals);
    BarrierInit(&team.task_sent[i], 1);
  }
  FenceBarrierInit();
}
#endif

}  // namespace jax_ep::gpu::team
