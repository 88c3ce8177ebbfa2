// An HT dispatch between nodes, before the pull (ht/dispatch/dispatch.cc):
//
//   SendRows   each row that another node needs goes to this rank's stage once, and from there by
//              commands to the rail's rank in each of those nodes, at the token's place, over a
//              fast wire with what is between them (WithGaps); a signal follows the last of each
//              slice. Weights, and the word of which call this is, go with the first. One kernel
//              sends all slices of the only round, or a round.
//   AwaitRows  for each rank of another node: waits until the mate on its rail has the slice's
//              rows, then says where they are, as that rank would have done here: a record and an
//              entry flag. It fails if the rows are of another program's call.
//
// PullRows then reads the slice from the mates' stages like rows of node-mates, while the next one
// is on its way: all slices of the only round, or two rounds, are sent before the first is awaited,
// and rows of node-mates are pulled before that.
//
// Four sets for rounds are enough. A rank sends rows of round e after it has met those of e - 2
// from its rail. They were sent after that node had left e - 4 (left flags), and after that rank
// had met what this one had sent in e - 4, which its proxy had read by then. Two sets are enough
// where calls are one round: the same with e - 1 and e - 2 (tail flags).
#include <algorithm>

#include "kernels/gpu/device/stage_copy.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/network/launchers.h"
#include "kernels/gpu/network/send.cuh"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / kWarpSize;
// Of a row, each a warp's: the first slice, for which the wire waits, has few rows.
constexpr uint32_t kRowPieces = 3;

struct SendRowsParams {
  DeviceRank device;
  SliceSpan slices;
  uint32_t recv_rows;  // of one rank in send_slot, at least 1
  uint64_t row_bytes;
  uint64_t weights_bytes;  // to go with the first slice of the call
  bool has_rows;
  const std::byte* x;        // [T, H]
  const float* weights;      // [T * K] or null
  const int32_t* send_slot;  // [T * K]
};

// One warp: whether other nodes hold rows of a token; where `says_so`, each of them wants it.
__device__ bool IsWantedElsewhere(const SendRowsParams& params, const TokenSlice& slice,
                                  uint64_t token, bool says_so) {
  const DeviceRank& device = params.device;
  const GroupShape& shape = device.shape;
  bool is_wanted = false;
  for (uint32_t first = 0; first < shape.top_k; first += kWarpSize) {
    const uint32_t k = first + LaneId();
    const int32_t slot = k < shape.top_k ? params.send_slot[token * shape.top_k + k] : -1;
    const uint32_t rank = RemoteHolderOf(device, slot, params.recv_rows);
    if (rank != kNoRank && says_so) {
      WantToken(device, slice, token,
                OtherNode(shape.num_nodes(), NodeOf(device), rank / shape.node_size));
    }
    is_wanted = Ballot(rank != kNoRank) != 0 || is_wanted;
  }
  return is_wanted;
}

// Where the round of a slice is: in this rank's stage, and in those of the rail's ranks. A copy, so
// that the pusher loads nothing behind its wait.
struct RowPlaces {
  uint32_t set;
  uint64_t here, call;  // `call`: from the round's begin on
  HeapArea there;

  __device__ RowPlaces(const DeviceRank& device, const TokenSlice& slice)
      : set(RoundSet(device, NetStateOf(device)->row_rounds + slice.round())),
        here(device.network->layout.rows_send.At(set)),
        call(device.network->layout.rows_call),
        there(device.network->layout.rows_recv) {}
};

// All threads of a maker.
__device__ void MakeRows(const SendRowsParams& params, bool has_failed) {
  const DeviceRank& device = params.device;
  const uint64_t span_begin = params.slices.begin();
  // Of a rank that has failed the stage may be gone.
  std::byte* stage =
      has_failed ? nullptr : OwnStage(device) + RowPlaces(device, params.slices.At(0)).here;
  if (params.weights_bytes > 0 && !has_failed) {
    BlocksCopyBytes(NumMakers(), stage + device.network->layout.rows_weights,
                    reinterpret_cast<const std::byte*>(params.weights), params.weights_bytes);
  }
  const uint64_t share = AlignUp(DivideUp(params.row_bytes, uint64_t{kRowPieces}), kWireUnitBytes);
  uint64_t unit = blockIdx.x * kWarps + WarpId();
  for (uint32_t i = 0; i < params.slices.count(); ++i) {
    const TokenSlice slice = params.slices.At(i);
    if (i > 0) has_failed = SyncBlockAny(threadIdx.x == 0 && HasFailed(device));
    const bool has_rows = params.has_rows && !has_failed;
    const uint64_t end = has_rows ? (slice.end - span_begin) * kRowPieces : 0;
    for (; unit < end; unit += NumMakers() * kWarps) {
      const uint64_t token = span_begin + unit / kRowPieces;
      const uint64_t begin = unit % kRowPieces * share;
      if (!IsWantedElsewhere(params, slice, token, begin == 0) || begin >= params.row_bytes) {
        continue;
      }
      WarpCopyBytes(stage + (token - slice.round_begin()) * params.row_bytes + begin,
                    params.x + token * params.row_bytes + begin,
                    begin + share < params.row_bytes ? share : params.row_bytes - begin);
    }
    EndSlice(device, slice);
  }
}

// All threads of the pusher.
__device__ void PushRows(const SendRowsParams& params, bool has_failed) {
  const DeviceRank& device = params.device;
  const uint64_t row_slices = NetStateOf(device)->row_slices;
  const RowPlaces places(device, params.slices.At(0));
  const SlicePusher pusher(device, Operation::kDispatch);
  if (!has_failed && threadIdx.x == 0 && params.slices.At(0).IsFirst()) {
    *reinterpret_cast<CallRecord*>(OwnStage(device) + places.here + places.call) = {
        FlagValue(SequenceOf(device), Operation::kDispatch, device.program)};
  }
  const auto command_to = [&](const TokenSlice& slice, uint32_t node, uint64_t offset) {
    const uint32_t back = OtherNode(device.shape.num_nodes(), node, NodeOf(device));
    return Command{.op = Op::kWrite,
                   .dst_rank = RailRank(device, node),
                   .local_offset = places.here + offset,
                   .remote_offset = places.there.At(places.set, back) + offset,
                   .channel = Channel::kDispatch,
                   .epoch = row_slices + slice.number + 1};
  };
  pusher.PushAll(
      params.slices, /*num_parts=*/1,
      [&](const TokenSlice& slice, uint32_t, uint32_t node, const TokenRun& run) {
        return run.Of(command_to(slice, node, 0), params.row_bytes);
      },
      [&](const TokenSlice& slice, uint32_t node) {
        const uint64_t head = sizeof(CallRecord) + AlignUp(params.weights_bytes, kWireUnitBytes);
        return SliceSignal(command_to(slice, node, places.call), slice.IsFirst() ? head : 0);
      });
}

__global__ void __launch_bounds__(kThreads)
    SendRows(const __grid_constant__ SendRowsParams params) {
  // All threads alike, though the rank may fail at any time.
  const bool has_failed = SyncBlockAny(threadIdx.x == 0 && HasFailed(params.device));
  IsPusher() ? PushRows(params, has_failed) : MakeRows(params, has_failed);
}

__global__ void __launch_bounds__(kThreads)
    AwaitRows(const __grid_constant__ DeviceRank device, const __grid_constant__ TokenSlice slice) {
  if (HasFailed(device)) return;
  const GroupShape& shape = device.shape;
  const NetLayout& layout = device.network->layout;
  NetState* state = NetStateOf(device);
  const uint32_t set = RoundSet(device, state->row_rounds + slice.round());
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  const uint64_t value = FlagValue(SequenceOf(device), Operation::kDispatch, device.program);
  auto* records = OwnHeapAt<DispatchRecord>(device, device.layout.records);
  // The pull of the round before, or of the mates, has ended.
  if (threadIdx.x == 0) ControlOf(device)->items_taken[slice.number_in_round()] = 0;
  for (uint32_t number = threadIdx.x; number < NumRemotes(device); number += kThreads) {
    const uint32_t source = RemoteRank(device, number);
    const uint32_t local = source % shape.node_size;
    if (!WaitSignals(device, local, Channel::kDispatch, source, Operation::kDispatch,
                     state->row_slices + slice.number + 1) ||
        !slice.BeginsRound()) {
      continue;
    }
    const uint64_t rows = layout.rows_recv.At(
        set, OtherNode(shape.num_nodes(), NodeOf(device), source / shape.node_size));
    records[source].x = (rows - slice.round_begin() * row_bytes) << 1;
    if (!slice.IsFirst()) continue;
    const auto said = *reinterpret_cast<const CallRecord*>(device.network->stages[local] + rows +
                                                           layout.rows_call);
    if (said.call != value) {
      Fail(device, FailureKind::kWrongOrder, Operation::kDispatch, source, value, said.call);
      continue;
    }
    records[source].weights = (rows + layout.rows_weights) << 1;
    OwnHeapAt<uint64_t>(device, device.layout.entry_flags)[source] = value;
  }
  SyncBlock();
  if (!slice.IsLast() || threadIdx.x != 0) return;
  state->row_rounds += slice.round() + 1;
  state->row_slices += slice.count;
}

}  // namespace

const char* PrepareNetDispatchKernels(const RankHandle&) {
  return PrepareKernels(0, &SendRows, &AwaitRows);
}

const char* LaunchSendRows(RankHandle& rank, const DispatchParams& call, const SliceSpan& slices,
                           cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  const bool has_weights = !call.recv_weights.empty();
  const auto num_pairs = static_cast<uint64_t>(call.num_tokens) * shape.top_k;
  const SendRowsParams params{
      .device = rank.device,
      .slices = slices,
      .recv_rows = static_cast<uint32_t>(std::max<int64_t>(call.recv_rows, 1)),
      .row_bytes = shape.hidden * ElemBytes(shape.elem_type),
      .weights_bytes = has_weights && slices.At(0).IsFirst() ? num_pairs * sizeof(float) : 0,
      .has_rows = call.recv_x != nullptr,
      .x = call.x,
      .weights = has_weights ? call.weights.data() : nullptr,
      .send_slot = call.send_slot.data()};
  const uint32_t blocks =
      BlocksToSend(slices.num_tokens() * kRowPieces, kWarps, BlocksBesideWire(rank));
  SendRows<<<blocks, kThreads, 0, stream>>>(params);
  return LaunchResult("SendRows");
}

const char* LaunchAwaitRows(RankHandle& rank, const TokenSlice& slice, cudaStream_t stream) {
  AwaitRows<<<1, kThreads, 0, stream>>>(rank.device, slice);
  return LaunchResult("AwaitRows");
}

}  // namespace jax_ep::gpu
