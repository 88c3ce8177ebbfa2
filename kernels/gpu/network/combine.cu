// An HT combine over several nodes, after EnterOperation (enter_operation.cu):
//
//   SumRows      this rank's partial of every token: to the owner's reduce area inside the node, to
//                that of the mate on the owner's rail for owners elsewhere; then tail flags to the
//                mates.
//   SendNodeSums the partials of each rank of the rail in other nodes are added along the tree and
//                go to its stage, one row per token that has any; a signal follows each slice.
//   AwaitSums    waits for a slice's signals of the rail.
//   AddNodes     this rank's tokens of that slice: the partials of the node and the sums of the
//                others, while the next slice is on its way.
//
// Reduce areas: mates write after the entry flags, hence after this rank's last combine. Stages: as
// in dispatch.cu.
#include <algorithm>

#include "kernels/gpu/lanes/partial_sums.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/network/launchers.h"
#include "kernels/gpu/network/send.cuh"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / kWarpSize;

__device__ inline NodeSums NodeSumsOf(const DeviceRank& device) {
  const NetLayout& layout = device.network->layout;
  return {OwnStage(device), layout.sums_recv, NextSet(NetStateOf(device)->combines),
          layout.sums_pitch, layout.sums_scalars};
}

template <typename S>
__global__ void __launch_bounds__(kThreads)
    SumRows(const __grid_constant__ CombineKernelParams params) {
  __shared__ uint32_t shared_flag;
  __shared__ TokenRows local[kWarps];
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  if (BlockWaitMates(device, device.layout.entry_flags, Operation::kCombine,
                     FlagValue(sequence, Operation::kCombine, device.program), &shared_flag)) {
    const RowIndex index(device, sequence, params.num_tokens);
    const uint32_t num_owners = device.shape.num_ranks - 1;
    const uint64_t num_items = static_cast<uint64_t>(params.num_tokens) * num_owners;
    for (uint64_t item = blockIdx.x * kWarps + WarpId(); item < num_items;
         item += gridDim.x * kWarps) {
      const auto step = static_cast<uint32_t>(item % num_owners);
      const uint32_t owner = (device.rank + 1 + step) % device.shape.num_ranks;
      S::SendPartial(params, index, owner, item / num_owners, local[WarpId()]);
    }
    // Own partials for other nodes' tokens are among these: the last owner is not this rank.
  }
  if (!LastToArrive(device, &shared_flag) || HasFailed(device)) return;
  BlockSignalMates(device, device.layout.tail_flags,
                   FlagValue(sequence, Operation::kCombine, device.program));
}

// One warp: the mates that have a partial of a token of `owner`, by local rank.
__device__ inline uint64_t PartsOf(const DeviceRank& device, uint32_t owner, uint64_t token) {
  const auto* presence = OwnHeapAt<uint32_t>(device, device.layout.reduce_presence);
  const uint32_t tag = TagOf(SequenceOf(device));
  uint64_t parts = 0;
  for (uint32_t local = LaneId(); local < device.shape.node_size; local += kWarpSize) {
    const uint64_t block = ReduceBlockOf(device, owner, device.node_begin + local);
    if (presence[block * device.shape.max_tokens + token] == tag) parts |= uint64_t{1} << local;
  }
  return WarpOr(parts);
}

// One warp: the sum of those parts, or their scalars, to their places in the stage.
template <typename S>
__device__ void WriteNodeSum(const CombineKernelParams& params, uint32_t owner, uint64_t token,
                             uint64_t parts, std::byte* to) {
  const DeviceRank& device = params.device;
  const GroupShape& shape = device.shape;
  const NetLayout& layout = device.network->layout;
  const auto place_of = [&](uint32_t local) {
    return ReduceBlockOf(device, owner, device.node_begin + local) * shape.max_tokens + token;
  };
  if (params.pair_scalars != nullptr) {
    const auto* from = OwnHeapAt<float>(device, device.layout.reduce_scalars);
    auto* scalars =
        reinterpret_cast<float*>(to + layout.sums_scalars) + token * shape.node_size * shape.top_k;
    for (uint32_t i = LaneId(); i < shape.node_size * shape.top_k; i += kWarpSize) {
      const uint32_t local = i / shape.top_k;
      if ((parts >> local & 1) == 0) continue;
      scalars[i] = from[place_of(local) * shape.top_k + i % shape.top_k];
    }
  }
  if (params.y == nullptr) return;
  constexpr uint32_t kWords = 1;
  const uint64_t num_words = params.row_bytes / sizeof(typename S::Word);
  auto* out = reinterpret_cast<typename S::PartialStorage*>(to + token * layout.sums_pitch);
  for (uint64_t word = LaneId(); word < num_words; word += kWords * kWarpSize) {
    float waiting[S::kTreeLevels][kWords][S::kElems];
    float sums[kWords][S::kElems];
    uint32_t is_present = 0;
    for (uint32_t local = 0; local < shape.node_size; ++local) {
      bool has_sums = (parts >> local & 1) != 0;
      if (has_sums) {
        const auto* from = OwnHeapAt<std::byte>(
            device, device.layout.reduce_rows + place_of(local) * device.layout.reduce_pitch);
        S::LoadPartial(from, word, num_words, sums);
      }
      is_present = AddToTree<typename S::PartialType>(local, RankLeaves::kNone, waiting, is_present,
                                                      has_sums, sums);
    }
    SumOfTree(shape.node_size, waiting, is_present, sums);
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
      const uint64_t at = word + i * kWarpSize;
      if (at < num_words) StoreElems<typename S::PartialType>(out + at * S::kElems, sums[i]);
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads)
    SendNodeSums(const __grid_constant__ CombineKernelParams params) {
  __shared__ uint32_t shared_flag;
  const DeviceRank& device = params.device;
  const GroupShape& shape = device.shape;
  const NetLayout& layout = device.network->layout;
  const uint32_t parity = NextSet(NetStateOf(device)->combines);
  const uint64_t epoch = NetStateOf(device)->sum_slices + params.slice.number + 1;
  const uint32_t num_others = shape.num_nodes() - 1;
  const auto num_items = static_cast<uint32_t>(params.slice.num_chunks()) * num_others;
  const uint64_t scalars_bytes =
      static_cast<uint64_t>(shape.node_size) * shape.top_k * sizeof(float);
  bool is_ok = BlockWaitMates(device, device.layout.tail_flags, Operation::kCombine,
                              FlagValue(SequenceOf(device), Operation::kCombine, device.program),
                              &shared_flag);
  for (uint32_t item = blockIdx.x * kWarps + WarpId(); is_ok && item < num_items;
       item += gridDim.x * kWarps) {
    const uint32_t other = item % num_others;
    const uint32_t node = NodeOfOther(shape.num_nodes(), NodeOf(device), other);
    const uint32_t owner = RailRank(device, node);
    const uint64_t send = layout.sums_send.At(parity, other);
    const uint64_t first = params.slice.begin + uint64_t{item / num_others} * kNetChunkTokens;
    uint32_t wanted = 0;
    for (uint32_t i = 0; i < kNetChunkTokens && first + i < params.slice.end; ++i) {
      const uint64_t parts = PartsOf(device, owner, first + i);
      if (parts == 0) continue;
      wanted |= 1u << i;
      WriteNodeSum<S>(params, owner, first + i, parts, OwnStage(device) + send);
    }
    SyncWarp();
    Command command{.op = Op::kWrite,
                    .dst_rank = owner,
                    .local_offset = send,
                    .remote_offset = layout.sums_recv.At(
                        parity, OtherNode(shape.num_nodes(), node, NodeOf(device))),
                    .channel = Channel::kCombine,
                    .epoch = epoch};
    if (params.y != nullptr) {
      is_ok = WarpPushRuns(device, Operation::kCombine, node, wanted, first, layout.sums_pitch,
                           command);
    }
    if (params.pair_scalars != nullptr && is_ok) {
      command.local_offset += layout.sums_scalars;
      command.remote_offset += layout.sums_scalars;
      is_ok =
          WarpPushRuns(device, Operation::kCombine, node, wanted, first, scalars_bytes, command);
    }
  }
  if (!LastToArrive(device, &shared_flag) || HasFailed(device) || WarpId() != 0) return;
  WarpPushToRail(device, Operation::kCombine, [&](uint32_t peer) {
    return Command{
        .op = Op::kSignal, .dst_rank = peer, .channel = Channel::kCombine, .epoch = epoch};
  });
}

__global__ void AwaitSums(const __grid_constant__ DeviceRank device,
                          const __grid_constant__ TokenSlice slice) {
  if (HasFailed(device)) return;
  const uint64_t epoch = NetStateOf(device)->sum_slices + slice.number + 1;
  for (uint32_t other = threadIdx.x; other + 1 < device.shape.num_nodes(); other += blockDim.x) {
    const uint32_t node = NodeOfOther(device.shape.num_nodes(), NodeOf(device), other);
    WaitSignals(device, LocalRankOf(device), Channel::kCombine, RailRank(device, node),
                Operation::kCombine, epoch);
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads)
    AddNodes(const __grid_constant__ CombineKernelParams params) {
  __shared__ uint32_t shared_flag;
  __shared__ TokenRows local[kWarps];
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  if (!HasFailed(device)) {
    const NodeSums sums = NodeSumsOf(device);
    const RowIndex index(device, sequence, params.num_tokens);
    for (uint64_t token = params.slice.begin + blockIdx.x * kWarps + WarpId();
         token < params.slice.end; token += gridDim.x * kWarps) {
      FinishToken<S>(params, index, token, local[WarpId()], sums);
    }
  }
  if (!params.slice.IsLast() || !FinishCombine(params, sequence, &shared_flag)) return;
  if (threadIdx.x != 0) return;
  NetState* state = NetStateOf(device);
  state->combines += 1;
  state->sum_slices += params.slice.count;
}

using Kernel = void (*)(CombineKernelParams);
struct Kernels {
  Kernel sum_rows, send_node_sums, add_nodes;
};

// One depth of the tree: the network is slower than registers that spill, and each costs a minute
// of the build.
Kernels KernelsOf(const GroupShape& shape, bool is_vectorised) {
  constexpr uint32_t kLevels = 7;
  static_assert(2 * kMaxNodeRanks <= 1u << kLevels, "nodes are filled up to powers of two");
  return WithSumTypes(shape, [&]<typename Elem, typename Partial>() {
    using Words = Sums<Elem, Partial, true, kLevels>;
    using Elems = Sums<Elem, Partial, false, kLevels>;
    return is_vectorised ? Kernels{&SumRows<Words>, &SendNodeSums<Words>, &AddNodes<Words>}
                         : Kernels{&SumRows<Elems>, &SendNodeSums<Elems>, &AddNodes<Elems>};
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
  const auto blocks_for = [&](uint64_t items) { return BlocksFor(items, kWarps, rank.max_blocks); };
  const uint64_t tokens = params.num_tokens;
  const uint32_t num_slices = NumTokenSlices(tokens, shape.num_nodes());
  kernels.sum_rows<<<blocks_for(tokens * (shape.num_ranks - 1)), kThreads, 0, stream>>>(params);
  if (const char* error = LaunchResult("SumRows")) return error;
  for (uint32_t number = 0; number < num_slices; ++number) {
    params.slice = TokenSliceOf(tokens, number, num_slices);
    const uint64_t num_sends = params.slice.num_chunks() * (shape.num_nodes() - 1);
    kernels.send_node_sums<<<blocks_for(num_sends), kThreads, 0, stream>>>(params);
    if (const char* error = LaunchResult("SendNodeSums")) return error;
  }
  for (uint32_t number = 0; number < num_slices; ++number) {
    params.slice = TokenSliceOf(tokens, number, num_slices);
    AwaitSums<<<1, kWarpSize, 0, stream>>>(rank.device, params.slice);
    if (const char* error = LaunchResult("AwaitSums")) return error;
    kernels.add_nodes<<<blocks_for(params.slice.num_tokens()), kThreads, 0, stream>>>(params);
    if (const char* error = LaunchResult("AddNodes")) return error;
  }
  return nullptr;
}

}  // namespace jax_ep::gpu
