// HT combine: every rank sums the rows that it has of a token, weighted, and stores the one partial
// into the token owner's reduce area; the owner adds the partials along the fixed tree.
//
//   EnterOperation (entry.cu): entry flag (peers are through with the last combine, so their reduce
//   areas are free), row index.
//   CombineRows: one grid runs both halves. Work is cut into chunks of kChunkTokens tokens, one
//   token per warp and one chunk per team of warps, in the same order on all ranks: the partials of
//   chunk c for each other owner, then the sums of this rank's chunk c - lag. A warp that sums
//   waits for the chunk's flags of all peers. Whatever it waits for comes earlier in the order, so
//   no wait is circular. One more warp per team sends the flags: it sees that the team is through
//   with a chunk, and its release makes their stores visible before the flag. Where there are bulk
//   copies, combine_bulk.cu has another CombineRows.
#include <algorithm>

#include "kernels/gpu/combine.cuh"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/local_rows.cuh"

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

// Weighted sum of the local rows, words word + i * kWarpSize for i < kWords.
template <typename Elem, typename Word, uint32_t kWords, uint32_t kElems>
__device__ inline void SumLocalRows(const CombineKernelParams& params, const LocalRows& local,
                                    uint32_t count, uint64_t word, uint64_t num_words,
                                    float (&sums)[kWords][kElems]) {
  for (uint32_t i = 0; i < count; ++i) {
    const auto* row = reinterpret_cast<const Word*>(
        params.y + static_cast<uint64_t>(local.rows[i]) * params.row_bytes);
    const float weight = local.weights[i];
    Word words[kWords];
#pragma unroll
    for (uint32_t j = 0; j < kWords; ++j) {
      if (word + j * kWarpSize < num_words) words[j] = row[word + j * kWarpSize];
    }
#pragma unroll
    for (uint32_t j = 0; j < kWords; ++j) {
      float values[kElems];
      Unpack<Elem>(words[j], values);
#pragma unroll
      for (uint32_t e = 0; e < kElems; ++e) {
        const float product = Multiply(weight, values[e]);
        sums[j][e] = i == 0 ? product : Add(sums[j][e], product);
      }
    }
  }
}

// kLevels: of the tree over ranks, num_ranks < 2^kLevels.
template <typename Elem, typename Partial, bool kIsVectorised, uint32_t kLevels>
struct Sums {
  using Word = typename WordOf<Elem, kIsVectorised>::Type;
  static constexpr uint32_t kElems = WordOf<Elem, kIsVectorised>::kElems;
  using PartialStorage = typename Partial::Storage;

  // One warp: this rank's partial of a token of `owner`.
  __device__ static void SendPartial(const CombineKernelParams& params, const RowIndex& index,
                                     uint32_t owner, uint64_t token, LocalRows& local) {
    const DeviceRank& device = params.device;
    const uint32_t count = FindRows(params, index, owner, token, local);
    if (count == 0) return;
    const uint64_t block = GpuHeapLayout::ReduceBlock(device.shape.num_ranks, owner, device.rank);
    const uint64_t place = block * device.shape.max_tokens + token;
    if (params.ride != nullptr) {
      float* rides =
          HeapAt<float>(device, owner, device.layout.reduce_rides) + place * device.shape.top_k;
      for (uint32_t k = LaneId(); k < device.shape.top_k; k += kWarpSize) {
        rides[k] = RideOf(params, local, k);
      }
    }
    if (params.y == nullptr) return;
    auto* to = HeapAt<PartialStorage>(
        device, owner, device.layout.reduce_rows + place * device.layout.reduce_pitch);
    constexpr uint32_t kWords = 4;
    const uint64_t num_words = params.row_bytes / sizeof(Word);
    for (uint64_t word = LaneId(); word < num_words; word += kWords * kWarpSize) {
      float sums[kWords][kElems];
      SumLocalRows<Elem, Word>(params, local, count, word, num_words, sums);
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) {
        const uint64_t index_of_word = word + i * kWarpSize;
        if (index_of_word < num_words) StoreElems<Partial>(to + index_of_word * kElems, sums[i]);
      }
    }
  }

  // One warp: the sum of a token of this rank. `has_partial` [N]: ranks that hold rows of it.
  __device__ static void SumToken(const CombineKernelParams& params, uint64_t token,
                                  const LocalRows& local, uint32_t num_local,
                                  uint64_t has_partial) {
    const DeviceRank& device = params.device;
    const uint32_t num_ranks = device.shape.num_ranks;
    constexpr uint32_t kWords = 2;
    const uint64_t num_words = params.row_bytes / sizeof(Word);
    auto* out = reinterpret_cast<Word*>(params.out + token * params.row_bytes);
    for (uint64_t word = LaneId(); word < num_words; word += kWords * kWarpSize) {
      float waiting[kLevels][kWords][kElems];
      uint32_t is_present = 0;
      float sums[kWords][kElems];
      bool has_sums = false;
      for (uint32_t rank = 0; rank < num_ranks; ++rank) {
        has_sums = (has_partial >> rank & 1) != 0;
        if (has_sums) LoadPartial(params, rank, token, local, num_local, word, num_words, sums);
        is_present = AddToTree(rank, waiting, is_present, has_sums, sums);
      }
      has_sums = SumOfTree(num_ranks, waiting, is_present, sums);
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) {
        if (!has_sums) {
#pragma unroll
          for (uint32_t e = 0; e < kElems; ++e) sums[i][e] = 0.0f;
        }
        if (word + i * kWarpSize < num_words) {
          out[word + i * kWarpSize] = Pack<Elem, Word>(sums[i]);
        }
      }
    }
  }

 private:
  template <uint32_t kWords>
  __device__ static void LoadPartial(const CombineKernelParams& params, uint32_t rank,
                                     uint64_t token, const LocalRows& local, uint32_t num_local,
                                     uint64_t word, uint64_t num_words,
                                     float (&sums)[kWords][kElems]) {
    const DeviceRank& device = params.device;
    if (rank == device.rank) {
      SumLocalRows<Elem, Word>(params, local, num_local, word, num_words, sums);
      RoundSums<Partial>(sums);
      return;
    }
    const uint64_t block = GpuHeapLayout::ReduceBlock(device.shape.num_ranks, device.rank, rank);
    const auto* from = OwnHeapAt<PartialStorage>(
        device, device.layout.reduce_rows +
                    (block * device.shape.max_tokens + token) * device.layout.reduce_pitch);
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
      const uint64_t index_of_word = word + i * kWarpSize;
      if (index_of_word < num_words) LoadElems<Partial>(from + index_of_word * kElems, sums[i]);
    }
  }
};

// One warp: everything about a token of this rank, its partials being here.
template <typename S>
__device__ void FinishToken(const CombineKernelParams& params, const RowIndex& index,
                            uint64_t token, LocalRows& local) {
  const DeviceRank& device = params.device;
  const uint32_t top_k = device.shape.top_k;
  const uint32_t num_ranks = device.shape.num_ranks;
  const uint32_t num_local = FindRows(params, index, device.rank, token, local);
  uint64_t has_partial = num_local > 0 ? uint64_t{1} << device.rank : 0;
  for (uint32_t first = 0; first < top_k; first += kWarpSize) {
    const uint32_t k = first + LaneId();
    const uint64_t cell = token * top_k + k;
    const int32_t slot = k < top_k ? params.send_slot[cell] : -1;
    // Plans come from the caller: a slot beyond the last rank is none.
    const uint32_t holder = slot >= 0 ? static_cast<uint32_t>(slot / params.recv_rows) : num_ranks;
    const bool is_placed = holder < num_ranks;
    if (is_placed && holder != device.rank) has_partial |= uint64_t{1} << holder;
    if (params.ride_out == nullptr || k >= top_k) continue;
    float ride = 0.0f;
    if (is_placed && holder == device.rank) {
      if (num_local > 0) ride = RideOf(params, local, k);
    } else if (is_placed) {
      const uint64_t block = GpuHeapLayout::ReduceBlock(num_ranks, device.rank, holder);
      ride = OwnHeapAt<float>(
          device,
          device.layout.reduce_rides)[(block * device.shape.max_tokens + token) * top_k + k];
    }
    params.ride_out[cell] = ride;
  }
  if (params.out == nullptr) return;
  for (uint32_t mask = kWarpSize / 2; mask > 0; mask /= 2) {
    has_partial |= FromLaneXor(has_partial, mask);
  }
  S::SumToken(params, token, local, num_local, has_partial);
}

template <typename S>
__device__ void RunTasks(const CombineKernelParams& params, uint64_t sequence, LocalRows& local,
                         uint32_t* tasks_done) {
  const uint32_t first = blockIdx.x * kTeams + WarpId() / kTeamWarps;
  const DeviceRank& device = params.device;
  const uint64_t value = FlagValue(sequence, Operation::kCombine);
  const RowIndex index(device, sequence, params.num_tokens);
  uint32_t num_done = 0;
  for (uint64_t number = first; number < NumTasks(params); number += gridDim.x * kTeams) {
    const Task task = TaskOf(params, number);
    const uint64_t token = static_cast<uint64_t>(task.chunk) * kChunkTokens + WarpId() % kTeamWarps;
    if (!task.is_empty && task.is_partial) {
      if (token < params.num_tokens) S::SendPartial(params, index, task.owner, token, local);
    } else if (!task.is_empty) {
      const uint64_t* flags = ChunkFlag(device, 0, task.chunk);
      const auto flag_of = [&](uint32_t peer) { return flags + peer * device.layout.num_chunks; };
      if (!WaitChunk(device, value, flag_of)) break;
      if (token < params.num_tokens) FinishToken<S>(params, index, token, local);
    }
    SyncWarp();
    if (LaneId() == 0) StoreReleaseBlock(tasks_done + WarpId(), ++num_done);
  }
}

// One warp, for the team whose warps count their tasks in `tasks_done`.
__device__ void SendChunkFlags(const CombineKernelParams& params, uint64_t sequence, uint32_t team,
                               const uint32_t* tasks_done) {
  const DeviceRank& device = params.device;
  const uint64_t value = FlagValue(sequence, Operation::kCombine);
  uint32_t num_done = 0;
  for (uint64_t number = blockIdx.x * kTeams + team; number < NumTasks(params);
       number += gridDim.x * kTeams) {
    ++num_done;
    const Task task = TaskOf(params, number);
    if (task.is_empty || !task.is_partial) continue;
    while (
        !AllLanes(LaneId() >= kTeamWarps || LoadAcquireBlock(tasks_done + LaneId()) >= num_done)) {
      if (AllLanes(HasFailed(device))) return;
      SleepBriefly();
    }
    SyncWarp();
    if (LaneId() != 0) continue;
    PublishChunk(device, task.owner, task.chunk, value);  // stored by the other warps
  }
}

template <typename Elem, typename Partial, bool kIsVectorised, uint32_t kLevels>
__global__ void __launch_bounds__(kThreads, 1)
    CombineRows(const __grid_constant__ CombineKernelParams params) {
  __shared__ uint32_t word;
  __shared__ uint32_t tasks_done[kSumWarps];
  __shared__ LocalRows local[kSumWarps];
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  if (threadIdx.x < kSumWarps) tasks_done[threadIdx.x] = 0;
  if (BlockWaitPeers(device, device.layout.entry_flags, Operation::kCombine,
                     FlagValue(sequence, Operation::kCombine), &word)) {
    if (WarpId() < kSumWarps) {
      RunTasks<Sums<Elem, Partial, kIsVectorised, kLevels>>(params, sequence, local[WarpId()],
                                                            tasks_done);
    } else {
      const uint32_t team = WarpId() - kSumWarps;
      SendChunkFlags(params, sequence, team, tasks_done + team * kTeamWarps);
    }
  }
  FinishCombine(params, &word);
}

using Kernel = void (*)(CombineKernelParams);

template <typename Elem, typename Partial>
Kernel KernelOf(uint32_t num_ranks, bool is_vectorised) {
  constexpr uint32_t kFewLevels = 3;
  constexpr uint32_t kMostLevels = 7;
  static_assert(kMaxNodeRanks < 1u << kMostLevels, "a rank's bit is a level of the tree");
  if (num_ranks < 1u << kFewLevels) {
    return is_vectorised ? &CombineRows<Elem, Partial, true, kFewLevels>
                         : &CombineRows<Elem, Partial, false, kFewLevels>;
  }
  return is_vectorised ? &CombineRows<Elem, Partial, true, kMostLevels>
                       : &CombineRows<Elem, Partial, false, kMostLevels>;
}

Kernel KernelOf(const GroupShape& shape, bool is_vectorised) {
  return WithSumTypes(shape, [&]<typename Elem, typename Partial>() {
    return KernelOf<Elem, Partial>(shape.num_ranks, is_vectorised);
  });
}

}  // namespace

const char* PrepareCombineKernels(const RankHandle& rank) {
  for (const bool is_vectorised : {false, true}) {
    const Kernel kernel = KernelOf(rank.device.shape, is_vectorised);
    if (const char* error = PrepareKernel(reinterpret_cast<const void*>(kernel), 0)) return error;
  }
#if JAX_EP_BULK_COPIES
  if (rank.use_bulk_copies) return PrepareBulkCombineKernels(rank);
#endif
  return nullptr;
}

const char* LaunchCombine(RankHandle& rank, const CombineParams& call, cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  if (std::string wrong = CheckCombine(shape, call); !wrong.empty()) {
    return KeepText("combine: " + std::move(wrong));
  }
  if (const char* error = LaunchEntry(rank,
                                      {.device = rank.device,
                                       .operation = Operation::kCombine,
                                       .recv_src = call.recv_src.data(),
                                       .recv_rows = static_cast<uint64_t>(call.recv_rows),
                                       .num_tokens = static_cast<uint64_t>(call.num_tokens)},
                                      stream)) {
    return error;
  }
  const auto is_aligned = [](const void* array) {
    return reinterpret_cast<uintptr_t>(array) % sizeof(uint4) == 0;
  };
  const auto num_tokens = static_cast<uint32_t>(call.num_tokens);
  CombineKernelParams params{
      .device = rank.device,
      .layout = call.layout,
      .num_tokens = num_tokens,
      .num_chunks = static_cast<uint32_t>((num_tokens + kChunkTokens - 1) / kChunkTokens),
      .recv_rows = static_cast<int32_t>(std::max<int64_t>(call.recv_rows, 1)),
      .row_bytes = shape.hidden * ElemBytes(shape.elem_type),
      .y = call.y,
      .row_weights = call.row_weights.empty() ? nullptr : call.row_weights.data(),
      .ride = call.ride.empty() ? nullptr : call.ride.data(),
      .send_slot = call.send_slot.data(),
      .out = call.y != nullptr ? call.out : nullptr,
      .ride_out = call.ride_out.empty() ? nullptr : call.ride_out.data()};
  const bool is_vectorised =
      params.row_bytes % sizeof(uint4) == 0 && is_aligned(call.y) && is_aligned(call.out);
#if JAX_EP_BULK_COPIES
  if (rank.use_bulk_copies && is_vectorised) return LaunchBulkCombine(rank, params, stream);
#endif
  const uint64_t num_tasks = static_cast<uint64_t>(params.num_chunks) * shape.num_ranks;
  const auto blocks = static_cast<uint32_t>(
      std::clamp<uint64_t>((num_tasks + kTeams - 1) / kTeams, 1, rank.max_blocks));
  // Far enough back that the flags of a chunk are here when its turn to be summed comes.
  constexpr uint32_t kRoundsBack = 2;
  params.lag =
      shape.num_ranks == 1
          ? 0
          : std::min(params.num_chunks,
                     (kRoundsBack * kTeams * blocks + shape.num_ranks - 1) / shape.num_ranks);
  KernelOf(shape, is_vectorised)<<<blocks, kThreads, 0, stream>>>(params);
  return LaunchResult("CombineRows");
}

}  // namespace jax_ep::gpu
