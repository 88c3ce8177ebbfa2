// Mode ll between nodes. A call there is a start and a done; around their kernels:
//
//   SendRecords  before the start of a dispatch: rows and routing to ranks of other nodes, straight
//                to each.
//   IndexPairs   before the start of a combine, which sends its records itself
//                (slot_combine_send.cuh): which rows it has of whose tokens.
//   TakeRecords  before a done: waits for the counts of other nodes' ranks, copies what they have
//                sent to where node-mates push, but for records that the done reads in the GPU's
//                own stage, and sets the same flags.
//
// The done says that the stage's set has been read (SayRead).
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
static_assert(kWarps == kSlotWarps);

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

// One warp of a team: whether a token has a row on a rank of another node. One of them says so.
__device__ bool WantRecords(const SendRecordsParams& params, uint32_t token, bool says_so) {
  const DeviceRank& device = params.device;
  const uint32_t top_k = device.shape.top_k;
  bool is_wanted = false;
  for (uint32_t first = 0; first < top_k; first += kWarpSize) {
    const uint32_t k = first + LaneId();
    const int32_t id = k < top_k ? params.ids[static_cast<uint64_t>(token) * top_k + k] : -1;
    const uint32_t peer = RemoteHolderOf(device, id, params.rank_ids);
    if (peer != kNoRank && says_so) WantRecord(device, token, peer);
    is_wanted = Ballot(peer != kNoRank) != 0 || is_wanted;
  }
  return is_wanted;
}

// All threads of the block: the rows of kRecordTokens tokens from `first` on.
__device__ void SendRows(const SendRecordsParams& params, const CallSlot& slot, uint64_t epoch,
                         uint32_t first, uint32_t* is_last) {
  const DeviceRank& device = params.device;
  const NetLayout& layout = device.network->layout;
  const uint32_t member = WarpId() % kTeamWarps;
  const uint32_t token = first + WarpId() / kTeamWarps;
  if (token < params.num_tokens && WantRecords(params, token, member == 0)) {
    std::byte* record = OwnStage(device) + layout.ll_rows_send.At(slot.set) + layout.ll_head_bytes +
                        token * layout.ll_row_pitch;
    const uint64_t share =
        AlignUp(DivideUp(params.row_bytes, uint64_t{kTeamWarps}), kWireUnitBytes);
    const uint64_t begin = member * share;
    if (begin < params.row_bytes) {
      WarpCopyBytes(record + begin, params.x + token * params.row_bytes + begin,
                    begin + share < params.row_bytes ? share : params.row_bytes - begin);
    }
    if (member == 0 && LaneId() == 0) {
      *reinterpret_cast<uint64_t*>(record + layout.ll_row_tag) =
          StartFlag(slot, Operation::kLlDispatchStart);
    }
  }
  SyncBlock();  // rows of all warps come before the commands that name them
  if (threadIdx.x == 0) {
    // This rank's own, which has no records, counts for all.
    RecordGroup& group = GroupOf(device, first, device.rank);
    *is_last = ArriveInGroup(group, first, params.num_tokens) ? 1 : 0;
  }
  SyncBlock();
  for (uint32_t number = WarpId(); number < NumRemotes(device) && *is_last != 0; number += kWarps) {
    const uint32_t peer = RemoteRank(device, number);
    Command command = ToSetOf(device, peer, slot.set, epoch);
    command.local_offset += layout.ll_head_bytes;
    command.remote_offset += layout.ll_head_bytes;
    WarpPushGroup(device, params.operation, first, layout.ll_row_pitch, command);
  }
  SyncBlock();  // the word can be used again
}

__global__ void __launch_bounds__(kThreads)
    SendRecords(const __grid_constant__ SendRecordsParams params) {
  __shared__ CallSlot slot;
  __shared__ uint32_t shared_flag;
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
    for (uint32_t first = blockIdx.x * kRecordTokens; first < num_rows;
         first += gridDim.x * kRecordTokens) {
      SendRows(params, slot, epoch, first, &shared_flag);
    }
  }
  if (!LastToArrive(device, &shared_flag) || slot.is_ok == 0 || HasFailed(device)) return;
  FinishSending(device, kKind, params.operation, slot, /*num_more=*/1);
}

__global__ void __launch_bounds__(kThreads)
    IndexPairs(const __grid_constant__ IndexPairsParams params) {
  const DeviceRank& device = params.device;
  if (blockIdx.x == 0 && threadIdx.x == 0) StampBegin(device, params.operation);
  // The start takes the busy word, but another call's index must not be touched before.
  const uint32_t busy = LoadRelaxedGpu(&ControlOf(device)->busy);
  if (threadIdx.x == 0 && busy != 0) {
    Fail(device, FailureKind::kBusy, params.operation, device.rank, 0, busy);
  }
  if (SyncBlockAny(threadIdx.x == 0 && (busy != 0 || HasFailed(device)))) return;
  const RowIndex index(device, SequenceOf(device), params.num_tokens);
  IndexRows(
      device, index, params.round, params.num_tokens, params.recv_src, params.recv_rows,
      [](uint32_t, uint32_t) { return true; }, blockIdx.x * kThreads + threadIdx.x,
      gridDim.x * kThreads);
}

// What a record of a kind has, and where it goes.
struct RecordFacts {
  PushArea area;
  uint64_t tag, row_bytes;
};
__device__ inline RecordFacts FactsOf(const DeviceRank& device, SetKind kind) {
  const NetLayout& layout = device.network->layout;
  const GroupShape& shape = device.shape;
  if (kind == SetKind::kLlDispatch) {
    return {device.layout.ll_dispatch, layout.ll_row_tag,
            shape.hidden * ElemBytes(shape.elem_type)};
  }
  const ElemType partial = shape.f32_partials ? ElemType::kF32 : shape.elem_type;
  return {device.layout.ll_combine, layout.ll_sum_tag, shape.hidden * ElemBytes(partial)};
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
  const RecordFacts facts = FactsOf(device, params.kind);
  const SentRecords records = RecordsOf(device, params.kind, slot.set, source);
  const bool is_dispatch = params.kind == SetKind::kLlDispatch;
  const bool are_copied = !AreReadInStage(device, source);
  const uint64_t value = StartFlag(slot, params.start_operation);
  auto* block = OwnHeapAt<std::byte>(device, facts.area.blocks.At(slot.set, source));
  if (part == 0) {
    const uint32_t cells = params.num_tokens * shape.top_k;
    if (is_dispatch) {
      const std::byte* from = records.begin - layout.ll_head_bytes;
      const auto tag = [&](uint64_t to, uint64_t at, uint32_t count) {  // a share by each warp
        const uint32_t share = (count + kWarps - 1) / kWarps;
        const uint32_t first = WarpId() * share;
        if (first >= count) return;
        WarpTag(reinterpret_cast<uint64_t*>(block + to) + first,
                from + at + first * sizeof(uint32_t), first + share < count ? share : count - first,
                slot.started);
      };
      tag(0, 0, PushHeader::kNumWords);
      if (params.has_ids) tag(device.layout.push_ids, layout.ll_ids, cells);
      if (params.has_weights) tag(device.layout.push_weights, layout.ll_weights, cells);
    } else if (threadIdx.x == 0) {
      *OwnHeapAt<uint64_t>(device, facts.area.meta_flags.At(slot.set, source)) = value;
    }
  }
  const uint64_t scalars_bytes = shape.top_k * sizeof(float);
  for (uint32_t token = part * kWarps + WarpId(); token < NumRecords(params);
       token += num_parts * kWarps) {
    const std::byte* record = records.Of(token);
    // Relaxed: the count came after it.
    const uint64_t tag = *reinterpret_cast<const volatile uint64_t*>(record + facts.tag);
    if (tag != value) {
      if (LaneId() == 0 && tag >> kCallBits == value >> kCallBits) {
        Fail(device, FailureKind::kWrongOrder, params.operation, source, value, tag);
      }
      continue;
    }
    if (params.has_rows && are_copied) {
      WarpCopyBytes(block + facts.area.rows + token * facts.area.pitch, record, facts.row_bytes);
    }
    if (!is_dispatch && are_copied) {
      WarpCopyBytes(block + token * scalars_bytes, record + layout.ll_sum_scalars, scalars_bytes);
    }
    SyncWarp();
    for (uint32_t piece = LaneId(); piece < params.num_pieces; piece += kWarpSize) {
      *OwnHeapAt<uint64_t>(device, PieceFlag(facts.area, slot.set, source, token, piece)) = value;
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
  const NetSets& sets = NetSetsOf(device, params.kind);
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
}

}  // namespace

const char* PrepareNetSlotKernels(const RankHandle&) {
  return PrepareKernels(0, &SendRecords, &IndexPairs, &TakeRecords);
}

const char* LaunchSendRecords(RankHandle& rank, const SendRecordsParams& params,
                              cudaStream_t stream) {
  // And the head, with ids and weights.
  const uint64_t items = AlignUp(params.num_tokens, kRecordTokens) + 1;
  const uint32_t blocks = BlocksFor(items, kRecordTokens, rank.ll_blocks);
  SendRecords<<<blocks, kThreads, 0, stream>>>(params);
  return LaunchResult("SendRecords");
}

const char* LaunchIndexPairs(RankHandle& rank, const IndexPairsParams& params,
                             cudaStream_t stream) {
  constexpr uint64_t kRowsOfThread = 4;
  const uint32_t blocks = BlocksFor(params.recv_rows, kRowsOfThread * kThreads, rank.ll_blocks);
  IndexPairs<<<blocks, kThreads, 0, stream>>>(params);
  return LaunchResult("IndexPairs");
}

const char* LaunchTakeRecords(RankHandle& rank, const TakeRecordsParams& params,
                              cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  const uint32_t num_remotes = shape.num_ranks - shape.node_size;
  const uint32_t most_parts = std::max(rank.ll_blocks / num_remotes, 1u);
  // Each looks at the host's signal; without rows to copy there is little to share.
  const uint32_t records_of_warp = rank.has_device_stages ? 4 : 1;
  const uint32_t parts = BlocksFor(NumRecords(params), records_of_warp * kWarps, most_parts);
  TakeRecords<<<num_remotes * parts, kThreads, 0, stream>>>(params);
  return LaunchResult("TakeRecords");
}

}  // namespace jax_ep::gpu
