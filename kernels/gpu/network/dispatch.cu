// An HT dispatch between nodes, before the pull (ht/dispatch/dispatch.cc):
//
//   SendRows   each row that another node needs goes to this rank's stage once, and from there by
//              commands to the rail's rank in each of those nodes, at the token's place; a signal
//              follows the last of each slice. Weights, and the word of which call this is, go with
//              the first.
//   AwaitRows  for each rank of another node: waits until the mate on its rail has the slice's
//              rows, then says where they are, as that rank would have done here: a record and an
//              entry flag. It fails if the rows are of another program's call.
//
// PullRows then reads the slice from the mates' stages like rows of node-mates, while the next one
// is on its way: all slices are sent before the first is awaited. Two sets are enough: a
// rank sends rows of dispatch e + 2 after it has met those of e + 1 from all of its rail, which
// were sent after their nodes had left e (tail flags).
#include <algorithm>

#include "kernels/gpu/device/stage_copy.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/network/launchers.h"
#include "kernels/gpu/network/send.cuh"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / kWarpSize;

struct SendRowsParams {
  DeviceRank device;
  TokenSlice slice;
  uint32_t recv_rows;  // of one rank in send_slot, at least 1
  uint64_t row_bytes;
  uint64_t weights_bytes;
  bool has_rows;
  const std::byte* x;        // [T, H]
  const float* weights;      // [T * K] or null
  const int32_t* send_slot;  // [T * K]
};

__global__ void __launch_bounds__(kThreads)
    SendRows(const __grid_constant__ SendRowsParams params) {
  __shared__ uint32_t shared_flag;
  // As WarpSet::Store has them; one more, so that lanes that look at many tokens meet all banks.
  constexpr uint32_t kWordsOfSet = kMaxRanks / WarpSet::kBitsPerLane + 1;
  __shared__ uint32_t nodes_of[kNetChunkTokens][kWordsOfSet];
  const DeviceRank& device = params.device;
  const GroupShape& shape = device.shape;
  const NetLayout& layout = device.network->layout;
  const uint32_t parity = NextSet(NetStateOf(device)->dispatches);
  const uint64_t epoch = NetStateOf(device)->row_slices + params.slice.number + 1;
  const uint64_t send = layout.rows_send.At(parity);
  std::byte* stage = OwnStage(device) + send;
  const auto remote_of = [&](uint32_t node) {
    return layout.rows_recv.At(parity, OtherNode(shape.num_nodes(), node, NodeOf(device)));
  };
  // Of a rank that has failed the stage may be gone.
  if (threadIdx.x == 0) shared_flag = params.has_rows && !HasFailed(device) ? 1 : 0;
  SyncBlock();
  const auto num_chunks = shared_flag != 0 ? static_cast<uint32_t>(params.slice.num_chunks()) : 0u;
  for (uint32_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    const auto first = static_cast<uint32_t>(params.slice.begin + chunk * kNetChunkTokens);
    for (uint32_t i = WarpId(); i < kNetChunkTokens; i += kWarps) {
      WarpSet nodes;
      if (first + i < params.slice.end) {
        nodes = RemoteHoldersOf(device, params.send_slot, first + i, params.recv_rows,
                                [&](uint32_t rank) { return rank / shape.node_size; });
      }
      if (!nodes.IsEmpty()) {
        const uint64_t at = (first + i) * params.row_bytes;
        WarpCopyBytes(stage + at, params.x + at, params.row_bytes);
      }
      nodes.Store(nodes_of[i], kMaxRanks);
    }
    SyncBlock();  // rows of all warps come before the commands that name them
    bool is_ok = AllLanes(!HasFailed(device));
    for (uint32_t other = WarpId(); is_ok && other + 1 < shape.num_nodes(); other += kWarps) {
      const uint32_t node = NodeOfOther(shape.num_nodes(), NodeOf(device), other);
      const bool is_wanted = LaneId() < kNetChunkTokens && WarpSet::Has(nodes_of[LaneId()], node);
      const auto wanted = static_cast<uint32_t>(Ballot(is_wanted));
      is_ok = WarpPushRuns(device, Operation::kDispatch, node, wanted, first, params.row_bytes,
                           {.op = Op::kWrite,
                            .dst_rank = RailRank(device, node),
                            .local_offset = send,
                            .remote_offset = remote_of(node),
                            .channel = Channel::kDispatch,
                            .epoch = epoch});
    }
    SyncBlock();  // nodes_of is free
  }
  if (params.weights_bytes > 0 && !HasFailed(device)) {
    GridCopyBytes(stage + layout.rows_weights, reinterpret_cast<const std::byte*>(params.weights),
                  params.weights_bytes);
  }
  if (!LastToArrive(device, &shared_flag) || HasFailed(device) || WarpId() != 0) return;
  const bool is_first = params.slice.number == 0;
  if (is_first && LaneId() == 0) {
    *reinterpret_cast<CallRecord*>(stage + layout.rows_call) = {
        FlagValue(SequenceOf(device), Operation::kDispatch, device.program)};
  }
  SyncWarp();
  WarpPushToRail(device, Operation::kDispatch, [&](uint32_t peer) {
    const uint64_t length = sizeof(CallRecord) + AlignUp(params.weights_bytes, kWireUnitBytes);
    return Command{.op = is_first ? Op::kWriteSignal : Op::kSignal,
                   .dst_rank = peer,
                   .length_bytes = is_first ? length : 0,
                   .local_offset = send + layout.rows_call,
                   .remote_offset = remote_of(peer / shape.node_size) + layout.rows_call,
                   .channel = Channel::kDispatch,
                   .epoch = epoch};
  });
}

__global__ void __launch_bounds__(kThreads)
    AwaitRows(const __grid_constant__ DeviceRank device, const __grid_constant__ TokenSlice slice) {
  if (HasFailed(device)) return;
  const GroupShape& shape = device.shape;
  const NetLayout& layout = device.network->layout;
  NetState* state = NetStateOf(device);
  const uint32_t parity = NextSet(state->dispatches);
  const uint64_t value = FlagValue(SequenceOf(device), Operation::kDispatch, device.program);
  auto* records = OwnHeapAt<DispatchRecord>(device, device.layout.records);
  for (uint32_t number = threadIdx.x; number < NumRemotes(device); number += kThreads) {
    const uint32_t source = RemoteRank(device, number);
    const uint32_t local = source % shape.node_size;
    if (!WaitSignals(device, local, Channel::kDispatch, source, Operation::kDispatch,
                     state->row_slices + slice.number + 1) ||
        slice.number > 0) {
      continue;
    }
    const uint64_t rows = layout.rows_recv.At(
        parity, OtherNode(shape.num_nodes(), NodeOf(device), source / shape.node_size));
    const auto said = *reinterpret_cast<const CallRecord*>(device.network->stages[local] + rows +
                                                           layout.rows_call);
    if (said.call != value) {
      Fail(device, FailureKind::kWrongOrder, Operation::kDispatch, source, value, said.call);
      continue;
    }
    records[source] = {rows << 1, (rows + layout.rows_weights) << 1};
    OwnHeapAt<uint64_t>(device, device.layout.entry_flags)[source] = value;
  }
  SyncBlock();
  if (!slice.IsLast() || threadIdx.x != 0) return;
  state->dispatches += 1;
  state->row_slices += slice.count;
}

}  // namespace

const char* PrepareNetDispatchKernels(const RankHandle&) {
  return PrepareKernels(0, &SendRows, &AwaitRows);
}

const char* LaunchSendRows(RankHandle& rank, const DispatchParams& call, uint32_t num_slices,
                           cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  const bool has_weights = !call.recv_weights.empty();
  SendRowsParams params{
      .device = rank.device,
      .recv_rows = static_cast<uint32_t>(std::max<int64_t>(call.recv_rows, 1)),
      .row_bytes = shape.hidden * ElemBytes(shape.elem_type),
      .weights_bytes =
          has_weights ? static_cast<uint64_t>(call.num_tokens) * shape.top_k * sizeof(float) : 0,
      .has_rows = call.recv_x != nullptr,
      .x = call.x,
      .weights = has_weights ? call.weights.data() : nullptr,
      .send_slot = call.send_slot.data()};
  for (uint32_t number = 0; number < num_slices; ++number) {
    params.slice = TokenSliceOf(static_cast<uint64_t>(call.num_tokens), number, num_slices);
    if (number > 0) params.weights_bytes = 0;
    const uint32_t blocks = BlocksFor(params.slice.num_chunks(), 1, rank.max_blocks);
    SendRows<<<blocks, kThreads, 0, stream>>>(params);
    if (const char* error = LaunchResult("SendRows")) return error;
  }
  return nullptr;
}

const char* LaunchAwaitRows(RankHandle& rank, const TokenSlice& slice, cudaStream_t stream) {
  AwaitRows<<<1, kThreads, 0, stream>>>(rank.device, slice);
  return LaunchResult("AwaitRows");
}

}  // namespace jax_ep::gpu
