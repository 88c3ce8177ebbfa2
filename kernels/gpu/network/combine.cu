// An HT combine over several nodes, after EnterOperation (enter_operation.cu):
//
//   SumRows      this rank's partial of every token of a slice: to the owner's reduce area inside
//                the node, to that of the mate on the owner's rail for owners elsewhere; then a
//                filled flag to the mates. A node's only rank makes them in the stage and sends
//                them, all slices of the only round by one kernel.
//   SendNodeSums the partials of each rank of the rail in other nodes are added along the tree and
//                go to its stage, one row per token that has any; a signal follows each slice, and
//                says with the first which call this is. The next slice's rows are summed
//                meanwhile.
//   AwaitSums    waits for a slice's signals of the rail; fails if they are of another program's
//                call.
//   AddNodes     this rank's tokens of that slice: the partials of the node and the sums of the
//                others, while the next slice is on its way.
//
// Reduce areas: mates write after the entry flags, hence after this rank's last combine; in rounds
// that use a set again after the left flags. Stages: as in dispatch.cu, but that each rank reads
// its own alone: it has left e - 4 when it sends e - 2.
#include <algorithm>

#include "kernels/gpu/lanes/reduce_area.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/network/launchers.h"
#include "kernels/gpu/network/send.cuh"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / kWarpSize;
// Of a token's row, each a warp's: a slice has few tokens. Of 1,024 that is two rounds of 100
// blocks, of 512 one.
constexpr uint32_t kRowPieces = 3;

// Partials of a token of this rank: of mates, and the sums of other nodes in this rank's stage.
struct NodePartials {
  const DeviceRank& device;
  uint32_t set;
  ReduceRound round;

  __device__ RankLeaves Leaves() const { return RankLeaves(device.shape); }
  // A node's sum is at its first rank.
  __device__ uint32_t RankAt(uint32_t holder) const {
    return IsMate(device, holder) ? holder
                                  : holder / device.shape.node_size * device.shape.node_size;
  }
  __device__ const std::byte* PartialOf(uint32_t rank, uint64_t token) const {
    if (IsMate(device, rank)) return MatePartials{device, round}.PartialOf(rank, token);
    return SumsOf(rank) + (token - round.begin) * device.network->layout.sums_pitch;
  }
  __device__ const float* ScalarsOf(uint32_t holder, uint64_t token) const {
    if (IsMate(device, holder)) return MatePartials{device, round}.ScalarsOf(holder, token);
    const GroupShape& shape = device.shape;
    const auto* scalars = SumsOf(holder) + device.network->layout.sums_scalars;
    return reinterpret_cast<const float*>(scalars) +
           ((token - round.begin) * shape.node_size + holder % shape.node_size) * shape.top_k;
  }

 private:
  // Of the node of `rank`.
  __device__ const std::byte* SumsOf(uint32_t rank) const {
    const uint32_t num_nodes = device.shape.num_nodes();
    const uint32_t other = OtherNode(num_nodes, NodeOf(device), rank / device.shape.node_size);
    return OwnStage(device) + device.network->layout.sums_recv.At(set, other);
  }
};

constexpr __device__ Pieces PiecesOf(uint32_t num_words, uint32_t count = kRowPieces) {
  return {count, (num_words + count - 1) / count};
}

// Where sums of the round of a slice are: in this rank's stage, and in those of the rail's ranks. A
// copy, so that the pusher loads nothing behind its wait.
struct SumPlaces {
  uint32_t set;
  HeapArea here, there;
  uint64_t pitch, scalars, call;  // the latter from a node's first sum on

  __device__ SumPlaces(const DeviceRank& device, const TokenSlice& slice)
      : set(RoundSet(device, NetStateOf(device)->sum_rounds + slice.round())),
        here(device.network->layout.sums_send),
        there(device.network->layout.sums_recv),
        pitch(device.network->layout.sums_pitch),
        scalars(device.network->layout.sums_scalars),
        call(device.network->layout.sums_call) {}
};

// All threads of the pusher of a kernel that makes sums in the stage.
__device__ void PushSums(const CombineKernelParams& params, const SliceSpan& slices) {
  const DeviceRank& device = params.device;
  const GroupShape& shape = device.shape;
  const uint64_t sum_slices = NetStateOf(device)->sum_slices;
  const SumPlaces places(device, slices.At(0));
  const SlicePusher pusher(device, Operation::kCombine);
  // Of a rank that has failed the stage may be gone.
  const bool has_failed = SyncBlockAny(threadIdx.x == 0 && HasFailed(device));
  const bool says_call = !has_failed && slices.At(0).IsFirst();
  for (uint32_t other = threadIdx.x; says_call && other + 1 < shape.num_nodes();
       other += blockDim.x) {
    *reinterpret_cast<CallRecord*>(OwnStage(device) + places.here.At(places.set, other) +
                                   places.call) = {
        FlagValue(SequenceOf(device), Operation::kCombine, device.program)};
  }
  const uint64_t scalars_bytes = uint64_t{shape.node_size} * shape.top_k * sizeof(float);
  const uint32_t num_parts = (params.y != nullptr) + (params.pair_scalars != nullptr);
  // From the sums of a node's tokens to where it keeps those of this one; `offset` in both.
  const auto command_to = [&](const TokenSlice& slice, uint32_t node, uint64_t offset) {
    const uint32_t other = OtherNode(shape.num_nodes(), NodeOf(device), node);
    const uint32_t back = OtherNode(shape.num_nodes(), node, NodeOf(device));
    return Command{.op = Op::kWrite,
                   .dst_rank = RailRank(device, node),
                   .local_offset = places.here.At(places.set, other) + offset,
                   .remote_offset = places.there.At(places.set, back) + offset,
                   .channel = Channel::kCombine,
                   .epoch = sum_slices + slice.number + 1};
  };
  pusher.PushAll(
      slices, num_parts,
      [&](const TokenSlice& slice, uint32_t part, uint32_t node, const TokenRun& run) {
        const bool are_rows = part == 0 && params.y != nullptr;
        return are_rows ? run.Of(command_to(slice, node, 0), places.pitch)
                        : run.Of(command_to(slice, node, places.scalars), scalars_bytes);
      },
      [&](const TokenSlice& slice, uint32_t node) {
        return SliceSignal(command_to(slice, node, places.call),
                           slice.IsFirst() ? sizeof(CallRecord) : 0);
      });
}

// All threads of a maker: whether the places of a slice's partials are free; they are, for slices
// that wait for nothing, since the call began. False: this rank has failed.
__device__ bool AwaitPlaces(const DeviceRank& device, const TokenSlice& slice,
                            uint32_t* shared_flag) {
  constexpr Operation kOperation = Operation::kCombine;
  if (slice.IsFirst()) {
    return BlockWaitMates(device, device.layout.entry_flags, kOperation,
                          FlagValue(SequenceOf(device), kOperation, device.program), shared_flag);
  }
  if (slice.num_left() > 0) {
    return BlockWaitMates(device, device.layout.left_flags, kOperation,
                          FreeFlag(device, kOperation, slice), shared_flag);
  }
  return !SyncBlockAny(threadIdx.x == 0 && HasFailed(device));
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    SumRows(const __grid_constant__ CombineKernelParams params,
            const __grid_constant__ SliceSpan slices) {
  __shared__ uint32_t shared_flag;
  __shared__ RowList lists[kWarps];
  const DeviceRank& device = params.device;
  if (IsPusher()) {
    if (device.shape.node_size == 1) return PushSums(params, slices);
    for (uint32_t i = 0; i < slices.count(); ++i) {
      const TokenSlice slice = slices.At(i);
      if (!AwaitMakers(device, slice, /*is_ok=*/true)) continue;
      BlockSignalMates(device, device.layout.filled_flags,
                       StepFlag(device, Operation::kCombine, slice));
    }
    return;
  }
  const uint32_t num_owners = device.shape.num_ranks - 1;
  const uint32_t num_words = RowWords<T>(params).end;
  // Of many ranks there are enough items, most without rows here, which cost a look each. The wire
  // waits for the first slice, which may be a short one.
  const uint64_t first_items = slices.At(0).num_tokens() * num_owners;
  const bool is_whole = params.y == nullptr || first_items >= uint64_t{NumMakers()} * kWarps;
  const Pieces pieces = PiecesOf(num_words, is_whole ? 1 : kRowPieces);
  const uint64_t span_begin = slices.begin();
  uint64_t unit = blockIdx.x * kWarps + WarpId();
  for (uint32_t i = 0; i < slices.count(); ++i) {
    const TokenSlice slice = slices.At(i);
    if (AwaitPlaces(device, slice, &shared_flag)) {
      const RowIndex index(device, SequenceOf(device), params.num_tokens);
      const ReduceRound round = ReduceRoundOf(device, slice);
      const uint64_t end = (slice.end - span_begin) * num_owners * pieces.count;
      for (; unit < end; unit += NumMakers() * kWarps) {
        const uint64_t item = unit / pieces.count;
        const auto step = static_cast<uint32_t>(item % num_owners);
        // Own partials for other nodes' tokens are among these: the last owner is not this rank.
        const uint32_t owner = (device.rank + 1 + step) % device.shape.num_ranks;
        SendPartial<T>(params, index, slice, round, owner, span_begin + item / num_owners,
                       lists[WarpId()],
                       WordsOf(pieces, static_cast<uint32_t>(unit % pieces.count), num_words));
      }
    }
    EndSlice(device, slice);
  }
}

// One warp: the mates that have a partial of a token of `owner`, by local rank.
__device__ inline uint64_t PartsOf(const DeviceRank& device, uint32_t owner, uint64_t token,
                                   const TokenSlice& slice) {
  const uint32_t tag = StepTag(device, slice);
  const ReduceRound round = ReduceRoundOf(device, slice);
  uint64_t parts = 0;
  for (uint32_t local = LaneId(); local < device.shape.node_size; local += kWarpSize) {
    const uint64_t block = ReduceBlockOf(device, owner, device.node_begin + local);
    const ReducePlace place(device, device.rank, round, block, token);
    if (*place.Presence() == tag) parts |= uint64_t{1} << local;
  }
  return WarpOr(parts);
}

// One warp: the sum of those parts, or their scalars, to their places in the stage.
template <typename T>
__device__ void WriteNodeSum(const CombineKernelParams& params, const TokenSlice& slice,
                             uint32_t owner, uint64_t token, uint64_t parts) {
  const DeviceRank& device = params.device;
  const GroupShape& shape = device.shape;
  const SumPlace to = StagedSumOf(device, slice, owner, token);
  const uint64_t first_block = ReduceBlockOf(device, owner, device.node_begin);
  const ReduceRound round = ReduceRoundOf(device, slice);
  const auto place_of = [&](uint32_t local) {
    return ReducePlace(device, device.rank, round, first_block + local, token);
  };
  if (params.pair_scalars != nullptr) {
    for (uint32_t i = LaneId(); i < shape.node_size * shape.top_k; i += kWarpSize) {
      const uint32_t local = i / shape.top_k;
      if ((parts >> local & 1) == 0) continue;
      to.scalars[i] = place_of(local).Scalars()[i % shape.top_k];
    }
  }
  if (params.y == nullptr) return;
  const WordRange range = RowWords<T>(params);
  if ((parts & (parts - 1)) == 0) {  // one part is the sum
    const auto local = static_cast<uint32_t>(__ffsll(static_cast<long long>(parts))) - 1;
    WarpCopyBytes(to.row, place_of(local).Row(), range.end * sizeof(typename T::PartialWord));
    return;
  }
  auto* out = reinterpret_cast<typename T::PartialWord*>(to.row);
  constexpr uint32_t kWords = 1;
  WriteSumOfRanks<T, typename T::Partial, kWords, /*kIsUnrolled=*/false>(
      RankLeaves(shape.node_size), /*has_any=*/true, range, out,
      [&](uint32_t leaf, uint32_t word, LeafWords<T, kWords>& words) {
#pragma unroll
        for (uint32_t i = 0; i < kLeavesAtOnce; ++i) {
          const bool is_here = (parts >> (leaf + i) & 1) != 0;
          LoadPartial<T>(place_of(leaf + i).Row(), is_here, word, range.end, words[i]);
        }
      });
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    SendNodeSums(const __grid_constant__ CombineKernelParams params,
                 const __grid_constant__ SliceSpan slices) {
  __shared__ uint32_t shared_flag;
  const DeviceRank& device = params.device;
  if (IsPusher()) return PushSums(params, slices);
  const uint32_t num_nodes = device.shape.num_nodes();
  for (uint32_t i = 0; i < slices.count(); ++i) {
    const TokenSlice slice = slices.At(i);
    const bool is_ok = BlockWaitMates(device, device.layout.filled_flags, Operation::kCombine,
                                      StepFlag(device, Operation::kCombine, slice), &shared_flag);
    const uint64_t num_items = is_ok ? slice.num_tokens() * (num_nodes - 1) : 0;
    for (uint64_t item = blockIdx.x * kWarps + WarpId(); item < num_items;
         item += NumMakers() * kWarps) {
      const auto other = static_cast<uint32_t>(item % (num_nodes - 1));
      const uint64_t token = slice.begin + item / (num_nodes - 1);
      const uint32_t owner = RailRank(device, NodeOfOther(num_nodes, NodeOf(device), other));
      const uint64_t parts = PartsOf(device, owner, token, slice);
      if (parts == 0) continue;
      if (LaneId() == 0) WantToken(device, slice, token, other);
      WriteNodeSum<T>(params, slice, owner, token, parts);
    }
    EndSlice(device, slice);
  }
}

__global__ void AwaitSums(const __grid_constant__ DeviceRank device,
                          const __grid_constant__ TokenSlice slice) {
  if (HasFailed(device)) return;
  const NetLayout& layout = device.network->layout;
  const uint32_t set = RoundSet(device, NetStateOf(device)->sum_rounds + slice.round());
  const uint64_t epoch = NetStateOf(device)->sum_slices + slice.number + 1;
  const uint64_t value = FlagValue(SequenceOf(device), Operation::kCombine, device.program);
  for (uint32_t other = threadIdx.x; other + 1 < device.shape.num_nodes(); other += blockDim.x) {
    const uint32_t source =
        RailRank(device, NodeOfOther(device.shape.num_nodes(), NodeOf(device), other));
    if (!WaitSignals(device, LocalRankOf(device), Channel::kCombine, source, Operation::kCombine,
                     epoch) ||
        !slice.IsFirst()) {
      continue;
    }
    const auto* said = reinterpret_cast<const CallRecord*>(
        OwnStage(device) + layout.sums_recv.At(set, other) + layout.sums_call);
    if (said->call == value) continue;
    Fail(device, FailureKind::kWrongOrder, Operation::kCombine, source, value, said->call);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    AddNodes(const __grid_constant__ CombineKernelParams params) {
  __shared__ uint32_t shared_flag;
  __shared__ RowList lists[kWarps];
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  if (!HasFailed(device)) {
    const NodePartials partials{
        device, RoundSet(device, NetStateOf(device)->sum_rounds + params.slice.round()),
        ReduceRoundOf(device, params.slice)};
    const RowIndex index(device, sequence, params.num_tokens);
    const uint32_t num_words = RowWords<T>(params).end;
    const Pieces pieces = PiecesOf(num_words);
    const auto num_units = static_cast<uint32_t>(params.slice.num_tokens()) * kRowPieces;
    for (uint32_t unit = blockIdx.x * kWarps + WarpId(); unit < num_units;
         unit += gridDim.x * kWarps) {
      FinishToken<T>(params, index, params.slice.begin + unit / kRowPieces, lists[WarpId()],
                     partials, WordsOf(pieces, unit % kRowPieces, num_words));
    }
  }
  if (!params.slice.EndsRound()) return;
  if (!params.slice.IsLast()) {
    if (!LastToArrive(device, &shared_flag) || HasFailed(device)) return;
    BlockSignalMates(device, device.layout.left_flags,
                     StepFlag(device, Operation::kCombine, params.slice));
    return;
  }
  if (!FinishCombine(params, sequence, &shared_flag) || threadIdx.x != 0) return;
  NetState* state = NetStateOf(device);
  state->sum_rounds += params.slice.round() + 1;
  state->sum_slices += params.slice.count;
}

struct Kernels {
  void (*sum_rows)(CombineKernelParams, SliceSpan);
  void (*send_node_sums)(CombineKernelParams, SliceSpan);
  void (*add_nodes)(CombineKernelParams);
};

// Trees of few leaves leave registers for more words on their way. Odd rows are rare, and each
// kernel costs seconds of the build.
Kernels KernelsOf(const GroupShape& shape, bool is_vectorised) {
  return WithSumTypes(shape, [&]<typename Elem, typename Partial>() {
    using Few = SumTypes<Elem, Partial, true, kFewLevels>;
    using Words = SumTypes<Elem, Partial, true, kFastLevels>;
    using Elems = SumTypes<Elem, Partial, false, kFastLevels>;
    if (!is_vectorised) return Kernels{&SumRows<Elems>, &SendNodeSums<Elems>, &AddNodes<Elems>};
    if (RankLeaves(shape).count > 1u << kFewLevels) {
      return Kernels{&SumRows<Words>, &SendNodeSums<Words>, &AddNodes<Words>};
    }
    return Kernels{&SumRows<Words>, &SendNodeSums<Few>, &AddNodes<Few>};
  });
}

}  // namespace

const char* PrepareNetCombineKernels(const RankHandle& rank) {
  for (const bool is_vectorised : {false, true}) {
    const Kernels kernels = KernelsOf(rank.device.shape, is_vectorised);
    if (const char* error =
            PrepareKernels(0, kernels.sum_rows, kernels.send_node_sums, kernels.add_nodes)) {
      return error;
    }
  }
  return PrepareKernel(&AwaitSums, 0);
}

const char* LaunchNetCombine(RankHandle& rank, const CombineKernelParams& call, bool is_vectorised,
                             cudaStream_t stream) {
  CombineKernelParams params = call;
  const GroupShape& shape = rank.device.shape;
  const Kernels kernels = KernelsOf(shape, is_vectorised);
  const uint32_t most = BlocksBetweenNodes(rank);
  const auto blocks_for = [&](uint64_t items) { return BlocksFor(items, kWarps, most); };
  const TokenCut cut = CutOf(rank, params.num_tokens, params.y != nullptr ? rank.sums_pitch : 0);
  const bool has_mates = shape.node_size > 1;
  const auto send = [&](const SliceSpan& slices) {
    const uint64_t num_units = slices.num_tokens() * (shape.num_ranks - 1) * kRowPieces;
    kernels.sum_rows<<<BlocksToSend(num_units, kWarps, most), kThreads, 0, stream>>>(params,
                                                                                     slices);
    const char* error = LaunchResult("SumRows");
    if (error != nullptr || !has_mates) return error;
    const uint64_t num_sums = slices.num_tokens() * (shape.num_nodes() - 1);
    kernels.send_node_sums<<<BlocksToSend(num_sums, kWarps, most), kThreads, 0, stream>>>(params,
                                                                                          slices);
    return LaunchResult("SendNodeSums");
  };
  const auto use = [&](const TokenSlice& slice) {
    params.slice = slice;
    AwaitSums<<<1, kWarpSize, 0, stream>>>(rank.device, slice);
    if (const char* error = LaunchResult("AwaitSums")) return error;
    const uint64_t num_units = slice.num_tokens() * kRowPieces;
    kernels.add_nodes<<<blocks_for(num_units), kThreads, 0, stream>>>(params);
    return LaunchResult("AddNodes");
  };
  // With mates slice by slice: node sums wait for those of all mates.
  return cut.ForEachSlice(/*sends_round=*/!has_mates, send, use);
}

}  // namespace jax_ep::gpu
