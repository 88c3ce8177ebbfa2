// A plan between nodes. Two exchanges, each between two kernels of the plan (ht/plan/plan.cu):
// counts before PlaceOwnPairs, lists before FillRecvSrc. A rank sends both over its rail, once to
// each other node, into the stage of its rail mate there. Every rank of that node reads them from
// that stage, copies them to where node-mates would have stored them, and sets their flags.
//
// Both signal on Channel::kPlan: plan e brings signals 2e - 1 and 2e. Two sets are enough: who
// sends counts of plan e + 2 has met the counts of e + 1 of all ranks that read its stage, which
// follow their last reads of e.
#include <algorithm>

#include "kernels/gpu/device/stage_copy.cuh"
#include "kernels/gpu/ht/plan/params.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/network/commands.cuh"
#include "kernels/gpu/network/launchers.h"

namespace jax_ep::gpu {
namespace {

using namespace planning;

struct ListParams {
  DeviceRank device;
  uint32_t num_pairs;  // T * K
  bool is_sorted;      // by expert; else ids by pair (rank_major), which every rank needs whole
};

__device__ inline const int32_t* CountsOfSource(const DeviceRank& device, uint64_t sequence,
                                                uint32_t source) {
  return OwnHeapAt<int32_t>(device, CountsOf(device, sequence, source) + sizeof(PlanHeader));
}

// All threads of the block copy `count` 4-byte words.
__device__ inline void BlockCopyInts(int32_t* to, const int32_t* from, uint32_t count) {
  constexpr uint32_t kInFlight = 4;
  for (uint32_t first = threadIdx.x; first < count; first += kInFlight * kThreads) {
    int32_t words[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (first + i * kThreads < count) words[i] = from[first + i * kThreads];
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (first + i * kThreads < count) to[first + i * kThreads] = words[i];
    }
  }
}

// All threads of the block; `is_ok` is shared. Takes what each other node's rank has sent as soon
// as it is there: copy(source, what it has put into `area` of its rail mate's stage).
template <typename Copy>
__device__ void TakeFromRemotes(const DeviceRank& device, uint64_t signal, const HeapArea& area,
                                uint64_t flags_offset, uint32_t* is_ok, Copy&& copy) {
  const uint64_t value = FlagValue(SequenceOf(device), Operation::kPlan, device.program);
  const uint64_t parity = (NetStateOf(device)->plans + 1) % 2;
  for (uint32_t number = 0; number < NumRemotes(device); ++number) {
    const uint32_t source = RemoteRank(device, number);
    const uint32_t rail = source % device.shape.node_size;
    if (threadIdx.x == 0) {
      *is_ok = WaitSignals(device, rail, Channel::kPlan, source, Operation::kPlan, signal) ? 1 : 0;
    }
    SyncBlock();
    if (*is_ok == 0) return;
    const uint32_t node = source / device.shape.node_size;
    copy(source, reinterpret_cast<const int32_t*>(
                     device.network->stages[rail] +
                     area.At(parity, OtherNode(device.shape.num_nodes(), NodeOf(device), node))));
    SyncBlock();
    if (threadIdx.x == 0) OwnHeapAt<uint64_t>(device, flags_offset)[source] = value;
  }
}

__global__ void __launch_bounds__(kThreads)
    ExchangeCounts(const __grid_constant__ DeviceRank device) {
  __shared__ uint32_t is_ok;
  if (HasFailed(device)) return;
  const NetLayout& layout = device.network->layout;
  const uint64_t sequence = SequenceOf(device);
  const uint64_t epoch = NetStateOf(device)->plans + 1;
  const uint64_t parity = epoch % 2;
  const auto count = static_cast<uint32_t>(layout.counts_bytes / sizeof(int32_t));
  BlockCopyInts(reinterpret_cast<int32_t*>(OwnStage(device) + layout.counts_send.At(parity)),
                OwnHeapAt<int32_t>(device, CountsOf(device, sequence, device.rank)), count);
  SyncBlock();
  if (WarpId() == 0) {
    WarpPushToRail(device, Operation::kPlan, [&](uint32_t peer) {
      return Command{.op = Op::kWriteSignal,
                     .dst_rank = peer,
                     .length_bytes = layout.counts_bytes,
                     .local_offset = layout.counts_send.At(parity),
                     .remote_offset = layout.counts_recv.At(parity, OwnNodeAt(device, peer)),
                     .channel = Channel::kPlan,
                     .epoch = 2 * epoch - 1};
    });
  }
  // A mate that is not in this plan is to blame itself, not the ranks on its rail.
  if (!BlockWaitMates(device, device.layout.entry_flags, Operation::kPlan,
                      FlagValue(sequence, Operation::kPlan, device.program), &is_ok)) {
    return;
  }
  TakeFromRemotes(device, 2 * epoch - 1, layout.counts_recv, device.layout.entry_flags, &is_ok,
                  [&](uint32_t source, const int32_t* from) {
                    BlockCopyInts(OwnHeapAt<int32_t>(device, CountsOf(device, sequence, source)),
                                  from, count);
                  });
}

// One warp. The part of a source's list that names rows of the ranks [first, end).
struct ListPart {
  uint32_t begin, end;
};
__device__ inline ListPart PartFor(const ListParams& params, const int32_t* counts, uint32_t first,
                                   uint32_t end) {
  if (!params.is_sorted) return {0, params.num_pairs};
  const uint32_t experts = params.device.shape.experts_per_rank();
  int32_t before = 0;
  int32_t own = 0;
  for (uint32_t expert = LaneId(); expert < end * experts; expert += kWarpSize) {
    (expert < first * experts ? before : own) += counts[expert];
  }
  before = WarpSum(before);
  own = WarpSum(own);
  return {static_cast<uint32_t>(before), static_cast<uint32_t>(before + own)};
}

__global__ void __launch_bounds__(kThreads)
    ExchangeLists(const __grid_constant__ ListParams params) {
  __shared__ uint32_t shared_flag;
  __shared__ ListPart part;
  __shared__ ListPart parts[kMaxRanks];  // by node
  const DeviceRank& device = params.device;
  const NetLayout& layout = device.network->layout;
  const uint64_t sequence = SequenceOf(device);
  const uint64_t epoch = NetStateOf(device)->plans + 1;
  const uint64_t parity = epoch % 2;
  std::byte* stage = OwnStage(device);
  if (!HasFailed(device)) {
    GridCopyBytes(stage + layout.list_send.At(parity),
                  OwnHeapAt<std::byte>(device, device.layout.plan_list),
                  params.num_pairs * sizeof(int32_t));
  }
  if (!LastToArrive(device, &shared_flag) || HasFailed(device)) return;
  // Whole units of the wire: the words beside a part are the same for everyone.
  constexpr uint32_t kUnit = kWireUnitBytes / sizeof(int32_t);
  const int32_t* own_counts = CountsOfSource(device, sequence, device.rank);
  const uint32_t node_size = device.shape.node_size;
  for (uint32_t node = WarpId(); node < device.shape.num_nodes(); node += kWarps) {
    const ListPart wanted = PartFor(params, own_counts, node * node_size, (node + 1) * node_size);
    if (LaneId() == 0) parts[node] = wanted;
  }
  SyncBlock();
  if (WarpId() == 0) {
    WarpPushToRail(device, Operation::kPlan, [&](uint32_t peer) {
      const ListPart sent = parts[peer / node_size];
      const uint64_t begin = sent.begin / kUnit * kWireUnitBytes;
      const uint64_t end = (sent.end + kUnit - 1) / kUnit * kWireUnitBytes;
      return Command{.op = sent.end > sent.begin ? Op::kWriteSignal : Op::kSignal,
                     .dst_rank = peer,
                     .length_bytes = sent.end > sent.begin ? end - begin : 0,
                     .local_offset = layout.list_send.At(parity) + begin,
                     .remote_offset = layout.list_recv.At(parity, OwnNodeAt(device, peer)) + begin,
                     .channel = Channel::kPlan,
                     .epoch = 2 * epoch};
    });
  }
  TakeFromRemotes(
      device, 2 * epoch, layout.list_recv, device.layout.list_flags, &shared_flag,
      [&](uint32_t source, const int32_t* from) {
        if (WarpId() == 0) {
          const ListPart taken = PartFor(params, CountsOfSource(device, sequence, source),
                                         device.rank, device.rank + 1);
          if (LaneId() == 0) part = taken;
        }
        SyncBlock();
        const uint32_t index = RemoteIndex(device.shape, NodeOf(device), source);
        BlockCopyInts(
            OwnHeapAt<int32_t>(device, device.layout.remote_lists.At(0, index)) + part.begin,
            from + part.begin, part.end - part.begin);
      });
  if (threadIdx.x == 0) NetStateOf(device)->plans = epoch;
}

}  // namespace

const char* PrepareNetPlanKernels(const RankHandle&) {
  return PrepareKernels(0, &ExchangeCounts, &ExchangeLists);
}

const char* LaunchExchangeCounts(RankHandle& rank, cudaStream_t stream) {
  ExchangeCounts<<<1, kThreads, 0, stream>>>(rank.device);
  return LaunchResult("ExchangeCounts");
}

const char* LaunchExchangeLists(RankHandle& rank, const PlanParams& plan, cudaStream_t stream) {
  const ListParams params{.device = rank.device,
                          .num_pairs = static_cast<uint32_t>(plan.topk_idx.size()),
                          .is_sorted = plan.layout != Layout::kRankMajor};
  constexpr uint32_t kPairsPerBlock = 8192;
  const auto blocks = std::clamp(params.num_pairs / kPairsPerBlock, 1u, rank.max_blocks);
  ExchangeLists<<<blocks, kThreads, 0, stream>>>(params);
  return LaunchResult("ExchangeLists");
}

}  // namespace jax_ep::gpu
