// Mode ll between nodes. A call there is a start and a done; around their kernels:
//
//   SendRecords  before the start of a dispatch: rows and routing to ranks of other nodes, straight
//                to each.
//   IndexPairs   before the start of a combine, which sends its records itself
//                (slot_combine_send.cuh): which rows it has of whose tokens.
//   TakeRecords  before a done of many remote ranks: takes in what they have sent
//                (take_records.cuh). Of few, the first blocks of the done do.
//
// The done notes that the stage's set has been read; as a rule the next start tells it (NoteRead).
#include <algorithm>

#include "kernels/gpu/launch.h"
#include "kernels/gpu/network/launchers.h"
#include "kernels/gpu/network/slots.cuh"
#include "kernels/gpu/network/take_records.cuh"

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
  if (slot.is_ok != 0 && blockIdx.x == gridDim.x - 1 && WarpId() == kWarps - 1) {
    TellReads(device, kKind, params.operation);
  }
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

struct TakeRecordsParams {
  DeviceRank device;
  RecordsToTake taken;
  const int32_t* epoch;
};
__global__ void __launch_bounds__(kThreads)
    TakeRecords(const __grid_constant__ TakeRecordsParams params) {
  __shared__ CallSlot slot;
  __shared__ uint32_t shared_flag;
  const DeviceRank& device = params.device;
  const RecordsToTake& taken = params.taken;
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) StampBegin(device, taken.operation);
    slot = FindOpenSet(device, taken.kind, taken.operation, *params.epoch);
    if (HasFailed(device)) slot.is_ok = 0;
  }
  SyncBlock();
  if (slot.is_ok != 0) BlockTakeRecords(device, taken, slot, blockIdx.x, &shared_flag);
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

const char* PrepareToTake(RankHandle& rank, const int32_t* epoch, RecordsToTake& taken,
                          uint32_t& num_take_blocks, cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  const uint32_t num_remotes = shape.num_ranks - shape.node_size;
  const uint32_t most_of_done = rank.ll_blocks / 4;
  const bool is_in_done = num_remotes <= most_of_done;
  const uint32_t most_parts =
      std::max((is_in_done ? most_of_done : rank.ll_blocks) / num_remotes, 1u);
  // Each looks at the host's signal; without rows to copy there is little to share.
  const uint32_t records_of_block = rank.has_device_stages ? kThreads : kWarps;
  taken.num_parts = BlocksFor(taken.num_records(), records_of_block, most_parts);
  const uint32_t blocks = num_remotes * taken.num_parts;
  num_take_blocks = is_in_done ? blocks : 0;
  if (is_in_done) return nullptr;
  TakeRecords<<<blocks, kThreads, 0, stream>>>({rank.device, taken, epoch});
  return LaunchResult("TakeRecords");
}

}  // namespace jax_ep::gpu
