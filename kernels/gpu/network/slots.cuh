// Slot sets between nodes (mode ll): what a start does for ranks of other nodes. A rank that it has
// records for gets one command per run of tokens, then their count; the proxy there counts
// arrivals, so their order is of no matter. A stage's set may be written again when its reader has
// said so, as a rule at the beginning of its next start: until then nobody needs to know.
#pragma once

#include "kernels/gpu/network/send.cuh"
#include "kernels/gpu/protocol/slot_sets.cuh"

namespace jax_ep::gpu {

struct SetChannels {
  Channel records, read;
};
__device__ inline SetChannels ChannelsOf(SetKind kind) {
  return kind == SetKind::kLlDispatch ? SetChannels{Channel::kLlDispatch, Channel::kLlDispatchDone}
                                      : SetChannels{Channel::kLlCombine, Channel::kLlCombineDone};
}
__device__ inline NetSets& NetSetsOf(const DeviceRank& device, SetKind kind) {
  return NetStateOf(device)->kinds[static_cast<uint32_t>(kind)];
}

// What `source`, of another node, has sent of a kind to a set of this rank's stage: its records.
struct SentRecords {
  const std::byte* begin;
  uint64_t pitch;

  __device__ const std::byte* Of(uint64_t token) const { return begin + token * pitch; }
};
__device__ inline SentRecords RecordsOf(const DeviceRank& device, SetKind kind, uint32_t set,
                                        uint32_t source) {
  const NetLayout& layout = device.network->layout;
  const uint32_t index = RemoteIndex(device.shape, NodeOf(device), source);
  if (kind == SetKind::kLlDispatch) {
    return {OwnStage(device) + layout.ll_rows_recv.At(set, index) + layout.ll_head_bytes,
            layout.ll_row_pitch};
  }
  return {OwnStage(device) + layout.ll_sums_recv.At(set, index), layout.ll_sum_pitch};
}
// Whether a done reads them there. Those in the host's memory are copied first: it may read them
// several times.
__device__ inline bool AreReadInStage(const DeviceRank& device, uint32_t source) {
  return device.network != nullptr && device.network->has_device_stages && !IsMate(device, source);
}

// All threads of each block of the kernel; `shared_flag` is in shared memory. True: every other
// node has read the last use of the set, here and there. As a rule a done has seen that already
// (NoteReads). Signals are in the host's memory, where blocks that look at one take a microsecond
// each, one after the other: so the first block looks and says so, and the others look themselves
// only if it takes long.
__device__ inline bool BlockWaitRead(const DeviceRank& device, SetKind kind, Operation operation,
                                     const CallSlot& slot, uint32_t* shared_flag) {
  constexpr uint64_t kPatienceNs = 1'000'000;
  NetSets& sets = NetSetsOf(device, kind);
  const uint64_t read = sets.sets[slot.set].read;
  if (WarpId() == 0) {
    bool is_ok = true;
    if (LaneId() == 0) {
      const auto is_there = [read](uint64_t seen) { return seen >= read; };
      is_ok = blockIdx.x == 0 ? is_there(LoadAcquireSys(&sets.read_by_others))
                              : ComesSoon(&sets.read_by_others, kPatienceNs, is_there);
    }
    if (!AllHaveWaited(is_ok)) {
      is_ok = true;
      for (uint32_t number = LaneId(); number < NumRemotes(device) && read > 0;
           number += kWarpSize) {
        is_ok = is_ok && WaitSignals(device, LocalRankOf(device), ChannelsOf(kind).read,
                                     RemoteRank(device, number), operation, read);
      }
      is_ok = AllHaveWaited(is_ok);
      if (is_ok && LaneId() == 0) StoreReleaseSys(&sets.read_by_others, read);
    }
    if (LaneId() == 0) *shared_flag = is_ok ? 1 : 0;
  }
  SyncBlock();
  const bool result = *shared_flag != 0;
  SyncBlock();
  return result;
}

// A block makes the records of kRecordTokens tokens at a time, each by a team of warps. Whoever
// makes the last ones of a group sends all of it: commands are what a proxy has most work with.
inline constexpr uint32_t kSlotWarps =
    512 / kWarpSize;  // of a block of a kernel that sends records
inline constexpr uint32_t kRecordTokens = 4;
inline constexpr uint32_t kTeamWarps = kSlotWarps / kRecordTokens;
static_assert(kTeamWarps * kRecordTokens == kSlotWarps && kGroupTokens % kRecordTokens == 0);

__device__ inline RecordGroup& GroupOf(const DeviceRank& device, uint32_t token, uint32_t peer) {
  return NetStateOf(device)->groups[token / kGroupTokens * device.shape.num_ranks + peer];
}
// A token's record to `peer` is made. Any thread, before its block arrives.
__device__ inline void WantRecord(const DeviceRank& device, uint32_t token, uint32_t peer) {
  atomicOr(&GroupOf(device, token, peer).wanted, 1u << token % kGroupTokens);
}
// One thread, behind a SyncBlock after a block has made its records of the tokens from `first` on.
// True: `group`, which counts these, has all of them.
__device__ inline bool ArriveInGroup(RecordGroup& group, uint32_t first, uint32_t num_tokens) {
  const uint32_t left = num_tokens - first / kGroupTokens * kGroupTokens;
  const uint32_t in_group = left < kGroupTokens ? left : kGroupTokens;
  const uint32_t shares = (in_group + kRecordTokens - 1) / kRecordTokens;
  if (FetchAddAcqRelGpu(&group.made, 1u) + 1 != shares) return false;
  group.made = 0;
  return true;
}

// One warp: the records of the group of `token` to command.dst_rank, by commands like `command`,
// whose offsets are those of token 0. They lie side by side at both ends.
__device__ inline void WarpPushGroup(const DeviceRank& device, Operation operation, uint32_t token,
                                     uint64_t pitch, Command command) {
  RecordGroup& group = GroupOf(device, token, command.dst_rank);
  const uint32_t wanted = LoadRelaxedGpu(&group.wanted);
  if (wanted == 0) return;
  SyncWarp();  // all lanes have it
  if (LaneId() == 0) group.wanted = 0;
  const Run run = RunOfLane(wanted);
  if (run.begins) {
    command.value = token / kGroupTokens * kGroupTokens + LaneId();
    command.length_bytes = run.length * pitch;
    command.local_offset += command.value * pitch;
    command.remote_offset += command.value * pitch;
    atomicAdd(&NetStateOf(device)->sent[command.dst_rank], 1u);
  }
  WarpPush(device, operation, command.dst_rank / device.shape.node_size, run.begins, command);
}

// One warp that has time: how far other nodes have read, which the next start asks for. Of many
// nodes that start looks itself.
__device__ inline void NoteReads(const DeviceRank& device, SetKind kind) {
  if (NumRemotes(device) > kWarpSize) return;
  NetSets& sets = NetSetsOf(device, kind);
  uint64_t read = ~uint64_t{0};
  if (LaneId() < NumRemotes(device)) {
    read = LoadAcquireSys(
        SignalOf(device, LocalRankOf(device), ChannelsOf(kind).read, RemoteRank(device, LaneId())));
  }
  for (uint32_t mask = kWarpSize / 2; mask > 0; mask /= 2) {
    const uint64_t other = FromLaneXor(read, mask);
    read = other < read ? other : read;
  }
  SyncWarp();  // what all lanes have acquired comes before what lane 0 publishes
  if (LaneId() == 0 && read > LoadRelaxedSys(&sets.read_by_others)) {
    StoreReleaseSys(&sets.read_by_others, read);
  }
}

// One warp: other nodes may write again to the sets that this rank has read. Not inline: kernels of
// one node have it and never call it.
__device__ __noinline__ inline void TellReads(const DeviceRank& device, SetKind kind,
                                              Operation operation) {
  NetSets& sets = NetSetsOf(device, kind);
  const uint64_t read = sets.read;
  for (uint64_t epoch = sets.read_told + 1; epoch <= read; ++epoch) {
    const bool is_told = WarpPushToAllRemotes(device, operation, [&](uint32_t peer) {
      return Command{
          .op = Op::kSignal, .dst_rank = peer, .channel = ChannelsOf(kind).read, .epoch = epoch};
    });
    if (!is_told) return;  // this rank has failed: nobody may get the next one without this
  }
  SyncWarp();  // all lanes have seen how many were told
  if (LaneId() == 0) sets.read_told = read;
}

// All threads of the last block of a done, before it ends the operation, which fails if this does:
// `set` has been read. To tell it costs the call microseconds, so that waits for the next start,
// unless that one can only take this set.
__device__ __noinline__ inline void NoteRead(const DeviceRank& device, SetKind kind,
                                             Operation operation, uint32_t set) {
  NetSets& sets = NetSetsOf(device, kind);
  if (WarpId() == 0) {
    const SetState* state = StateOf(device, kind);
    const bool is_other = LaneId() < device.shape.depth && LaneId() != set;
    const bool has_free_set = Ballot(is_other && state->sets[LaneId()].is_open == 0) != 0;
    if (LaneId() == 0) {
      sets.read += 1;
      sets.sets[set].read = sets.read;
    }
    SyncWarp();
    if (!has_free_set) TellReads(device, kind, operation);
  }
  SyncBlock();  // all threads see whether that failed
}

// All threads of the last block of the kernel that sent: the counts. `num_more` commands were sent
// to everyone and not counted.
__device__ inline void FinishSending(const DeviceRank& device, SetKind kind, Operation operation,
                                     const CallSlot& slot, uint32_t num_more) {
  NetState* state = NetStateOf(device);
  NetSets& sets = NetSetsOf(device, kind);
  const uint64_t epoch = sets.started + 1;
  if (WarpId() == 0) {
    WarpPushToAllRemotes(device, operation, [&](uint32_t peer) {
      return Command{.op = Op::kSignal,
                     .dst_rank = peer,
                     .channel = ChannelsOf(kind).records,
                     .epoch = epoch,
                     .value = LoadRelaxedGpu(&state->sent[peer]) + num_more};
    });
  }
  SyncBlock();
  for (uint32_t peer = threadIdx.x; peer < device.shape.num_ranks; peer += blockDim.x) {
    state->sent[peer] = 0;
  }
  if (threadIdx.x == 0) {
    sets.started = epoch;
    sets.sets[slot.set].epoch = epoch;
  }
}

}  // namespace jax_ep::gpu
