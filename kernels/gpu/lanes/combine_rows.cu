// HT combine without bulk copies (ht/combine/combine.cc).
//
// One grid makes partials and sums. Work is cut into chunks of kChunkTokens, one token per warp and
// one chunk per team of warps, in the same order on all ranks: the partials of chunk c for each
// other owner, then the sums of this rank's chunk c - lag. Running teams take tasks in that order.
// So however few of a grid's blocks run at a time, a running team has taken every task that comes
// before one that is being done. A warp that sums waits for the chunk's flags of all peers. What it
// waits for comes earlier in the order, so no wait is circular. One more warp per team takes the
// tasks and sends the flags: it sees that the team has stored a chunk, and its release makes the
// stores visible before the flag.
#include <algorithm>

#include "kernels/gpu/ht/combine/combine.cuh"
#include "kernels/gpu/lanes/reduce_area.cuh"
#include "kernels/gpu/launch.h"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kTeams = kWarpSize > 32 ? 1 : 2;
constexpr uint32_t kTeamWarps = kChunkTokens;
constexpr uint32_t kSumWarps = kTeams * kTeamWarps;
constexpr uint32_t kThreads = (kSumWarps + kTeams) * kWarpSize;

// One unit of work of a block.
struct Task {
  bool is_partial;
  bool is_empty;
  uint32_t owner;  // of a partial
  uint32_t chunk;
};

__device__ inline Task TaskOf(const CombineKernelParams& params, uint64_t number) {
  const uint32_t num_ranks = params.device.shape.num_ranks;
  const auto group = static_cast<uint32_t>(number / num_ranks);
  const auto position = static_cast<uint32_t>((number % num_ranks + Scatter(group)) % num_ranks);
  Task task;
  task.is_partial = position != num_ranks - 1;
  task.owner = (params.device.rank + 1 + position) % num_ranks;
  if (task.is_partial) {
    task.chunk = group;
    task.is_empty = group >= params.num_chunks;
  } else {
    task.chunk = group - params.lag;
    task.is_empty = group < params.lag;
  }
  return task;
}
__device__ inline uint64_t NumTasks(const CombineKernelParams& params) {
  return static_cast<uint64_t>(params.num_chunks + params.lag) * params.device.shape.num_ranks;
}

// The tasks of a team, in shared memory. Its last warp takes them, the others do them.
struct TeamTasks {
  static constexpr uint32_t kAhead = 4;  // taken and not yet done
  uint32_t taken[kAhead];                // 1 + number of a task, a ring: ascending
  uint32_t num_done[kTeamWarps];         // by each warp
};

// One warp of a team but the last.
template <typename T>
__device__ void RunTasks(const CombineKernelParams& params, uint64_t sequence, RowList& list,
                         TeamTasks& tasks) {
  const uint32_t warp = WarpId() % kTeamWarps;
  const DeviceRank& device = params.device;
  const uint64_t value = FlagValue(sequence, Operation::kCombine, device.program);
  const RowIndex index(device, sequence, params.num_tokens);
  uint32_t taken = 0;
  for (uint32_t num_done = 0;;) {
    const uint32_t* next = &tasks.taken[num_done % TeamTasks::kAhead];
    const uint32_t before = taken;
    while (!AllLanes((taken = LoadAcquireBlock(next)) > before)) {
      if (AllLanes(HasFailed(device))) return;
      SleepBriefly();
    }
    const uint64_t number = taken - 1;
    if (number >= NumTasks(params)) return;
    const Task task = TaskOf(params, number);
    const uint64_t token = uint64_t{task.chunk} * kChunkTokens + warp;
    if (!task.is_empty && task.is_partial) {
      if (token < params.num_tokens) {
        SendPartial<T>(params, index, /*slice=*/{}, /*round=*/{}, task.owner, token, list,
                       RowWords<T>(params));
      }
    } else if (!task.is_empty) {
      const uint64_t* flags = ChunkFlag(device, 0, task.chunk);
      const auto flag_of = [&](uint32_t peer) { return flags + peer * device.layout.num_chunks; };
      if (!WaitChunk(device, value, flag_of)) return;
      if (token < params.num_tokens)
        FinishToken<T>(params, index, token, list, MatePartials{device}, RowWords<T>(params));
    }
    ++num_done;
    SyncWarp();
    if (LaneId() == 0) StoreReleaseBlock(&tasks.num_done[warp], num_done);
  }
}

// The last warp of a team: takes tasks, the next ones before they are needed, and sends the flags
// of those that the others are through with.
__device__ void TakeTasks(const CombineKernelParams& params, uint64_t sequence, TeamTasks& tasks) {
  const DeviceRank& device = params.device;
  const uint64_t value = FlagValue(sequence, Operation::kCombine, device.program);
  uint32_t num_taken = 0;
  for (uint32_t num_sent = 0;; ++num_sent) {
    for (; num_taken < num_sent + TeamTasks::kAhead; ++num_taken) {
      if (LaneId() != 0) continue;
      const uint32_t number = atomicAdd(&ControlOf(device)->partials_taken, 1u);
      StoreReleaseBlock(&tasks.taken[num_taken % TeamTasks::kAhead], number + 1);
    }
    SyncWarp();
    const uint64_t number = LoadAcquireBlock(&tasks.taken[num_sent % TeamTasks::kAhead]) - 1;
    if (number >= NumTasks(params)) return;
    while (!AllLanes(LaneId() >= kTeamWarps ||
                     LoadAcquireBlock(&tasks.num_done[LaneId()]) > num_sent)) {
      if (AllLanes(HasFailed(device))) return;
      SleepBriefly();
    }
    SyncWarp();
    const Task task = TaskOf(params, number);
    if (LaneId() != 0 || task.is_empty || !task.is_partial) continue;
    PublishChunk(device, task.owner, task.chunk, value);  // stored by the other warps
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    CombineRows(const __grid_constant__ CombineKernelParams params) {
  __shared__ uint32_t shared_flag;
  __shared__ TeamTasks tasks[kTeams];
  __shared__ RowList lists[kSumWarps];
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  if (threadIdx.x < kTeams) tasks[threadIdx.x] = {};
  if (Enter(device, params.entry, sequence)) {
    if (WarpId() < kSumWarps) {
      RunTasks<T>(params, sequence, lists[WarpId()], tasks[WarpId() / kTeamWarps]);
    } else {
      TakeTasks(params, sequence, tasks[WarpId() - kSumWarps]);
    }
  }
  FinishCombine(params, sequence, &shared_flag);
}

using Kernel = void (*)(CombineKernelParams);

template <typename Elem, typename Partial>
Kernel KernelOf(uint32_t num_ranks, bool is_vectorised) {
  constexpr uint32_t kMostLevels = 6;
  static_assert(kMaxNodeRanks <= 1u << kMostLevels);
  // Odd rows are rare, and each kernel costs seconds of the build.
  if (!is_vectorised) return &CombineRows<SumTypes<Elem, Partial, false, kMostLevels>>;
  return num_ranks <= 1u << kFewLevels ? &CombineRows<SumTypes<Elem, Partial, true, kFewLevels>>
                                       : &CombineRows<SumTypes<Elem, Partial, true, kMostLevels>>;
}

Kernel KernelOf(const GroupShape& shape, bool is_vectorised) {
  return WithSumTypes(shape, [&]<typename Elem, typename Partial>() {
    return KernelOf<Elem, Partial>(shape.num_ranks, is_vectorised);
  });
}

}  // namespace

const char* PrepareCombineRows(const RankHandle& rank) {
  const GroupShape& shape = rank.device.shape;
  return PrepareKernels(0, KernelOf(shape, false), KernelOf(shape, true));
}

const char* LaunchCombineRows(RankHandle& rank, const CombineKernelParams& call, bool is_vectorised,
                              cudaStream_t stream) {
  CombineKernelParams params = call;
  const GroupShape& shape = rank.device.shape;
  const uint64_t num_tasks = static_cast<uint64_t>(params.num_chunks) * shape.num_ranks;
  const uint32_t blocks = BlocksFor(num_tasks, kTeams, params.max_blocks);
  // Far enough back that the flags of a chunk are here when its turn to be summed comes.
  constexpr uint32_t kRoundsBack = 2;
  params.lag =
      shape.num_ranks == 1
          ? 0
          : std::min(params.num_chunks, static_cast<uint32_t>(DivideUp(
                                            kRoundsBack * kTeams * blocks, shape.num_ranks)));
  KernelOf(shape, is_vectorised)<<<blocks, kThreads, 0, stream>>>(params);
  return LaunchResult("CombineRows");
}

}  // namespace jax_ep::gpu
