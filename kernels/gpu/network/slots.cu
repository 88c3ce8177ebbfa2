// Mode ll between nodes. A call there is a start and a done; around their kernels:
//
//   SendRecords  before the start of a dispatch: rows and routing to ranks of other nodes, straight
//                to each. (The start of a combine sends its records itself, slot_combine_send.cuh.)
//   TakeRecords  before a done: waits for the counts of other nodes' ranks, copies their records to
//                where node-mates push and sets the same flags, and says that the stage's set has
//                been read.
#include <algorithm>

#include "kernels/gpu/launch.h"
#include "kernels/gpu/network/launchers.h"
#include "kernels/gpu/network/slots.cuh"
#include "kernels/gpu/protocol/push.cuh"
#include "kernels/gpu/protocol/tagged_words.cuh"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / kWarpSize;

// From this rank's set of a dispatch to where `peer` keeps what comes from it.
__device__ inline Command ToSetOf(const DeviceRank& device, uint32_t peer, uint32_t set,
                                  uint64_t epoch) {
  const NetLayout& layout = device.network->layout;
  return {.op = Op::kWrite,
          .dst_rank = peer,
          .local_offset = layout.ll_rows_send.At(set),
          .remote_offset = layout.ll_rows_recv.At(set, OwnIndexAt(device, peer)),
          .channel = Channel::kLlDispatch,
          .epoch = epoch};
}

// One warp.
__device__ void SendHead(const SendRecordsParams& params, const CallSlot& slot, uint64_t epoch) {
  const DeviceRank& device = params.device;
  const NetLayout& layout = device.network->layout;
  std::byte* head = OwnStage(device) + layout.ll_rows_send.At(slot.set);
  const uint64_t cells_bytes =
      static_cast<uint64_t>(params.num_tokens) * device.shape.top_k * sizeof(int32_t);
  uint64_t num_bytes = layout.ll_weights;
  if (params.weights != nullptr) num_bytes = layout.ll_weights + cells_bytes;
  if (params.is_routed) num_bytes = layout.ll_ids + cells_bytes;
  if (LaneId() == 0) *reinterpret_cast<PushHeader*>(head) = params.header;
  if (params.is_routed) {
    WarpCopyBytes(head + layout.ll_ids, reinterpret_cast<const std::byte*>(params.ids),
                  cells_bytes);
  }
  if (params.weights != nullptr) {
    WarpCopyBytes(head + layout.ll_weights, reinterpret_cast<const std::byte*>(params.weights),
                  cells_bytes);
  }
  SyncWarp();
  WarpPushToAllRemotes(device, params.operation, [&](uint32_t peer) {
    Command command = ToSetOf(device, peer, slot.set, epoch);
    command.length_bytes = AlignUp(num_bytes, kWireUnitBytes);
    command.value = static_cast<uint32_t>(device.shape.ll_tokens);  // the number after the rows'
    return command;
  });
}

// Tokens that a block sends together, one a warp, so that neighbours that go to one rank are one
// command.
constexpr uint32_t kSentTokens = kWarps;

// All threads of the block.
__device__ void SendRows(const SendRecordsParams& params, const CallSlot& slot, uint64_t epoch,
                         uint32_t first, StoredSet (&dests_of)[kSentTokens]) {
  const DeviceRank& device = params.device;
  const NetLayout& layout = device.network->layout;
  const uint32_t token = first + WarpId();
  WarpSet dests;
  if (token < params.num_tokens) {
    dests = RemoteHoldersOf(device, params.ids, token, params.rank_ids,
                            [](uint32_t rank) { return rank; });
  }
  if (!dests.IsEmpty()) {
    std::byte* record = OwnStage(device) + layout.ll_rows_send.At(slot.set) + layout.ll_head_bytes +
                        token * layout.ll_row_pitch;
    WarpCopyBytes(record, params.x + token * params.row_bytes, params.row_bytes);
    if (LaneId() == 0) {
      *reinterpret_cast<uint64_t*>(record + layout.ll_row_tag) =
          StartFlag(slot, Operation::kLlDispatchStart);
    }
  }
  dests.Store(dests_of[WarpId()], kMaxRanks);
  SyncBlock();  // rows of all warps come before the commands that name them
  for (uint32_t number = WarpId(); number < NumRemotes(device); number += kWarps) {
    const uint32_t peer = RemoteRank(device, number);
    const bool is_wanted = LaneId() < kSentTokens && WarpSet::Has(dests_of[LaneId()], peer);
    const auto wanted = static_cast<uint32_t>(Ballot(is_wanted));
    if (wanted == 0) continue;
    Command command = ToSetOf(device, peer, slot.set, epoch);
    command.local_offset += layout.ll_head_bytes;
    command.remote_offset += layout.ll_head_bytes;
    WarpPushRecords(device, params.operation, wanted, first, layout.ll_row_pitch, command);
  }
  SyncBlock();  // dests_of is free
}

__global__ void __launch_bounds__(kThreads)
    SendRecords(const __grid_constant__ SendRecordsParams params) {
  __shared__ CallSlot slot;
  __shared__ uint32_t shared_flag;
  __shared__ StoredSet dests_of[kSentTokens];
  const DeviceRank& device = params.device;
  constexpr SetKind kKind = SetKind::kLlDispatch;
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) StampBegin(device, params.operation);
    slot = FindFreeSet(device, kKind, params.operation);
    if (HasFailed(device)) slot.is_ok = 0;  // the stage may be gone
  }
  SyncBlock();
  const uint64_t epoch = NetSetsOf(device, kKind).started + 1;
  if (slot.is_ok != 0 && BlockWaitRead(device, kKind, params.operation, slot, &shared_flag)) {
    const uint32_t num_rows = params.x != nullptr ? params.num_tokens : 0;
    if (blockIdx.x == gridDim.x - 1 && WarpId() == 0) SendHead(params, slot, epoch);
    for (uint32_t first = blockIdx.x * kSentTokens; first < num_rows;
         first += gridDim.x * kSentTokens) {
      SendRows(params, slot, epoch, first, dests_of);
    }
  }
  if (!LastToArrive(device, &shared_flag) || slot.is_ok == 0 || HasFailed(device)) return;
  FinishSending(device, kKind, params.operation, slot, /*num_more=*/1);
}

// Where records of a kind arrive, and where they go.
struct RecordPlaces {
  PushArea area;
  HeapArea stage;
  uint64_t head_bytes, pitch, tag, row_bytes;
};
__device__ inline RecordPlaces PlacesOf(const DeviceRank& device, SetKind kind) {
  const NetLayout& layout = device.network->layout;
  const GroupShape& shape = device.shape;
  if (kind == SetKind::kLlDispatch) {
    return {device.layout.ll_dispatch, layout.ll_rows_recv,
            layout.ll_head_bytes,      layout.ll_row_pitch,
            layout.ll_row_tag,         shape.hidden * ElemBytes(shape.elem_type)};
  }
  const ElemType partial = shape.f32_partials ? ElemType::kF32 : shape.elem_type;
  return {device.layout.ll_combine, layout.ll_sums_recv, 0,
          layout.ll_sum_pitch,      layout.ll_sum_tag,   shape.hidden * ElemBytes(partial)};
}

// Of a dispatch without rows nothing but the head has come.
__host__ __device__ inline uint32_t NumRecords(const TakeRecordsParams& params) {
  const bool is_head_alone = params.kind == SetKind::kLlDispatch && !params.has_rows;
  return is_head_alone ? 0 : params.num_tokens;
}

// All threads of the block: its part of what `source` has sent.
__device__ void TakeFrom(const TakeRecordsParams& params, const CallSlot& slot, uint32_t source,
                         uint32_t part, uint32_t num_parts) {
  const DeviceRank& device = params.device;
  const GroupShape& shape = device.shape;
  const NetLayout& layout = device.network->layout;
  const RecordPlaces places = PlacesOf(device, params.kind);
  const bool is_dispatch = params.kind == SetKind::kLlDispatch;
  const uint64_t value = StartFlag(slot, params.start_operation);
  const std::byte* from =
      OwnStage(device) + places.stage.At(slot.set, RemoteIndex(shape, NodeOf(device), source));
  auto* block = OwnHeapAt<std::byte>(device, places.area.blocks.At(slot.set, source));
  if (part == 0 && WarpId() == 0) {
    const uint32_t cells = params.num_tokens * shape.top_k;
    if (is_dispatch) {
      const auto tag = [&](uint64_t to, uint64_t at, uint32_t count) {
        WarpTag(reinterpret_cast<uint64_t*>(block + to), from + at, count, slot.started);
      };
      tag(0, 0, PushHeader::kNumWords);
      if (params.has_ids) tag(device.layout.push_ids, layout.ll_ids, cells);
      if (params.has_weights) tag(device.layout.push_weights, layout.ll_weights, cells);
    } else if (LaneId() == 0) {
      *OwnHeapAt<uint64_t>(device, places.area.meta_flags.At(slot.set, source)) = value;
    }
  }
  const uint64_t scalars_bytes = shape.top_k * sizeof(float);
  for (uint32_t token = part * kWarps + WarpId(); token < NumRecords(params);
       token += num_parts * kWarps) {
    const std::byte* record = from + places.head_bytes + token * places.pitch;
    // Relaxed: the count came after it.
    const uint64_t tag = *reinterpret_cast<const volatile uint64_t*>(record + places.tag);
    if (tag != value) {
      if (LaneId() == 0 && tag >> kCallBits == value >> kCallBits) {
        Fail(device, FailureKind::kWrongOrder, params.operation, source, value, tag);
      }
      continue;
    }
    if (params.has_rows) {
      WarpCopyBytes(block + places.area.rows + token * places.area.pitch, record, places.row_bytes);
    }
    if (!is_dispatch) {
      WarpCopyBytes(block + token * scalars_bytes, record + layout.ll_sum_scalars, scalars_bytes);
    }
    SyncWarp();
    for (uint32_t piece = LaneId(); piece < params.num_pieces; piece += kWarpSize) {
      *OwnHeapAt<uint64_t>(device, PieceFlag(places.area, slot.set, source, token, piece)) = value;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    TakeRecords(const __grid_constant__ TakeRecordsParams params) {
  __shared__ CallSlot slot;
  __shared__ uint32_t shared_flag;
  const DeviceRank& device = params.device;
  const uint32_t num_remotes = NumRemotes(device);
  const uint32_t source = RemoteRank(device, blockIdx.x % num_remotes);
  NetSets& sets = NetSetsOf(device, params.kind);
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) StampBegin(device, params.operation);
    slot = FindOpenSet(device, params.kind, params.operation, *params.epoch);
    shared_flag = slot.is_ok != 0 && !HasFailed(device) &&
                          WaitSignals(device, LocalRankOf(device), ChannelsOf(params.kind).records,
                                      source, params.operation, sets.sets[slot.set].epoch)
                      ? 1
                      : 0;
  }
  SyncBlock();
  if (shared_flag != 0) {
    TakeFrom(params, slot, source, blockIdx.x / num_remotes, gridDim.x / num_remotes);
  }
  SyncBlock();
  if (!LastToArrive(device, &shared_flag) || slot.is_ok == 0 || HasFailed(device)) return;
  const uint64_t read = sets.read + 1;
  if (WarpId() == 0) {
    WarpPushToAllRemotes(device, params.operation, [&](uint32_t peer) {
      return Command{.op = Op::kSignal,
                     .dst_rank = peer,
                     .channel = ChannelsOf(params.kind).read,
                     .epoch = read};
    });
  }
  SyncBlock();
  if (threadIdx.x == 0) {
    sets.read = read;
    sets.sets[slot.set].read = read;
  }
}

}  // namespace

const char* PrepareNetSlotKernels(const RankHandle&) {
  return PrepareKernels(0, &SendRecords, &TakeRecords);
}

const char* LaunchSendRecords(RankHandle& rank, const SendRecordsParams& params,
                              cudaStream_t stream) {
  // And the head, with ids and weights.
  const uint64_t items = AlignUp(params.num_tokens, kSentTokens) + 1;
  const uint32_t blocks = BlocksFor(items, kSentTokens, rank.ll_blocks);
  SendRecords<<<blocks, kThreads, 0, stream>>>(params);
  return LaunchResult("SendRecords");
}

const char* LaunchTakeRecords(RankHandle& rank, const TakeRecordsParams& params,
                              cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  const uint32_t num_remotes = shape.num_ranks - shape.node_size;
  const uint32_t most_parts = std::max(rank.ll_blocks / num_remotes, 1u);
  const uint32_t parts = BlocksFor(NumRecords(params), kWarps, most_parts);
  TakeRecords<<<num_remotes * parts, kThreads, 0, stream>>>(params);
  return LaunchResult("TakeRecords");
}

}  // namespace jax_ep::gpu
