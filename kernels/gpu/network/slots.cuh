// Slot sets between nodes (mode ll): what a start does for ranks of other nodes. A rank that it has
// records for gets one command per run of tokens, then their count; the proxy there counts
// arrivals, so their order is of no matter. A stage's set may be written again when its reader has
// said so.
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

// All threads of the block; `shared_flag` is in shared memory. True: every other node has read the
// last use of the set, here and there.
__device__ inline bool BlockWaitRead(const DeviceRank& device, SetKind kind, Operation operation,
                                     const CallSlot& slot, uint32_t* shared_flag) {
  const uint64_t read = NetSetsOf(device, kind).sets[slot.set].read;
  if (WarpId() == 0) {
    bool is_ok = true;
    for (uint32_t number = LaneId(); number < NumRemotes(device) && read > 0; number += kWarpSize) {
      is_ok = is_ok && WaitSignals(device, LocalRankOf(device), ChannelsOf(kind).read,
                                   RemoteRank(device, number), operation, read);
    }
    is_ok = AllHaveWaited(is_ok);
    if (LaneId() == 0) *shared_flag = is_ok ? 1 : 0;
  }
  SyncBlock();
  const bool result = *shared_flag != 0;
  SyncBlock();
  return result;
}

// One warp: the records of tokens first + i with bit i in `wanted` to command.dst_rank, by commands
// like `command`, whose offsets are those of token 0. They lie side by side at both ends.
__device__ inline void WarpPushRecords(const DeviceRank& device, Operation operation,
                                       uint32_t wanted, uint32_t first, uint64_t pitch,
                                       Command command) {
  const Run run = RunOfLane(wanted);
  if (run.begins) {
    command.value = first + LaneId();
    command.length_bytes = run.length * pitch;
    command.local_offset += command.value * pitch;
    command.remote_offset += command.value * pitch;
    atomicAdd(&NetStateOf(device)->sent[command.dst_rank], 1u);
  }
  WarpPush(device, operation, command.dst_rank / device.shape.node_size, run.begins, command);
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
