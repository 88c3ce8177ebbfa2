// Slot sets: where pushed or staged rows wait between the start of a call and its done. A kind has
// shape.depth of them. A call takes a set that no open start holds, the one that has been free for
// longest, so whole calls may run between a start and its done. All ranks execute the same calls in
// the same order, hence all choose the same set.
//
// A set may be written again when every rank has read its previous use: each rank says so in the
// consumed flags of its mates, when a done ends and, for whole calls, when the next start or whole
// call of the kind begins.
#pragma once

#include <cstdint>

#include "kernels/epoch.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/protocol/control.cuh"

namespace jax_ep::gpu {

// What a call knows of its set.
struct CallSlot {
  uint32_t is_ok;
  uint32_t set;
  uint32_t program;      // fingerprint of the call that began it
  uint64_t sequence;     // number of this operation
  uint64_t started;      // number of the operation that began it
  uint64_t reusable_at;  // operation whose reading of the set must be over, 0: none
};

// Flag of what the call's first part, `operation`, has put into the set. A done may belong to
// another program than its start, so the start's is kept beside the set.
__device__ inline uint64_t StartFlag(const CallSlot& slot, Operation operation) {
  return FlagValue(slot.started, operation, slot.program);
}
// Consumed flag: sets are read in turn by calls of any program.
__device__ inline uint64_t ReadFlag(uint64_t sequence) {
  return FlagValue(sequence, Operation{}, 0);
}

__device__ inline SetState* StateOf(const DeviceRank& rank, SetKind kind) {
  return OwnHeapAt<SetState>(rank, rank.layout.set_states) + static_cast<uint32_t>(kind);
}
__device__ inline uint64_t ConsumedOffset(const DeviceRank& rank, SetKind kind) {
  return rank.layout.consumed_flags +
         static_cast<uint64_t>(kind) * rank.shape.num_ranks * sizeof(uint64_t);
}

// Epochs of the halves count operations.
__device__ inline int32_t EpochOf(const DeviceRank& rank, uint64_t sequence) {
  return PackEpoch(sequence, rank.generation);
}

// One thread. The set that a start or whole call takes; fails the rank if all are open.
__device__ inline CallSlot FindFreeSet(const DeviceRank& rank, SetKind kind, Operation operation) {
  const SetState* state = StateOf(rank, kind);
  const uint64_t sequence = SequenceOf(rank);
  CallSlot slot{.is_ok = 0,
                .set = 0,
                .program = rank.program,
                .sequence = sequence,
                .started = sequence,
                .reusable_at = 0};
  uint64_t done[kMaxDepth];
  uint32_t is_open[kMaxDepth];
#pragma unroll
  for (uint32_t set = 0; set < kMaxDepth; ++set) {  // all loads at once
    done[set] = state->sets[set].done;
    is_open[set] = state->sets[set].is_open;
  }
  uint32_t num_open = 0;
#pragma unroll
  for (uint32_t set = 0; set < kMaxDepth; ++set) {
    if (set >= rank.shape.depth) continue;
    num_open += is_open[set] != 0;
    if (is_open[set] != 0 || (slot.is_ok != 0 && done[set] >= slot.reusable_at)) continue;
    slot.is_ok = 1;
    slot.set = set;
    slot.reusable_at = done[set];
  }
  if (slot.is_ok == 0) {
    Fail(rank, FailureKind::kTooManyOpen, operation, rank.rank, rank.shape.depth, num_open + 1);
  }
  return slot;
}

// One thread. The set that the start of `epoch` holds; fails the rank if none does.
__device__ inline CallSlot FindOpenSet(const DeviceRank& rank, SetKind kind, Operation operation,
                                       int32_t epoch) {
  const SetState* state = StateOf(rank, kind);
  uint64_t newest = 0;
  for (uint32_t set = 0; set < rank.shape.depth; ++set) {
    const SlotSet& candidate = state->sets[set];
    newest = candidate.started > newest ? candidate.started : newest;
    if (candidate.is_open == 0 || EpochOf(rank, candidate.started) != epoch) continue;
    return {.is_ok = 1,
            .set = set,
            .program = candidate.program,
            .sequence = SequenceOf(rank),
            .started = candidate.started,
            .reusable_at = 0};
  }
  Fail(rank, FailureKind::kStaleEpoch, operation, rank.rank, static_cast<uint32_t>(epoch), newest);
  return {.is_ok = 0, .set = 0, .program = 0, .sequence = 0, .started = 0, .reusable_at = 0};
}

// Threads of one block. Says to all peers that this rank has read the sets of the kind up to the
// operation `done`.
__device__ inline void SignalConsumed(const DeviceRank& rank, SetKind kind, uint64_t done) {
  if (done == 0) return;
  BlockSignalMates(rank, ConsumedOffset(rank, kind), ReadFlag(done));
}

// What the warps of a block do at the beginning of an operation with a set, besides the first ones,
// which may have rows to send.
inline constexpr uint32_t kReadWarp = 4;    // ReadByMates
inline constexpr uint32_t kSlotWarp = 5;    // finds the set
inline constexpr uint32_t kBusyWarp = 6;    // of the first block
inline constexpr uint32_t kFailedWarp = 6;  // of the last block

// All threads of every block, at the beginning of an operation with a set, while it is found.
__device__ inline void BeginSetOperation(const DeviceRank& rank, Operation operation) {
  if (blockIdx.x == 0 && threadIdx.x == kBusyWarp * kWarpSize) TakeBusyWord(rank, operation);
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == kFailedWarp * kWarpSize) {
    FailAfterPeer(rank, operation);
  }
}
// All threads of every block, behind a SyncBlock after that. In the first block, since peers wait
// for it, its last warp, so that those with rows do not wait for the release.
__device__ inline void SignalLastRead(const DeviceRank& rank, SetKind kind, CallPart part) {
  if (blockIdx.x != 0 || WarpId() != blockDim.x / kWarpSize - 1 || part == CallPart::kDone) return;
  const uint64_t done = StateOf(rank, kind)->last_done;
  for (uint32_t peer = rank.node_begin + LaneId(); peer < MatesEnd(rank) && done != 0;
       peer += kWarpSize) {
    if (peer == rank.rank) continue;
    StoreReleaseSys(HeapAt<uint64_t>(rank, peer, ConsumedOffset(rank, kind)) + SenderTo(rank, peer),
                    ReadFlag(done));
  }
}

// One warp, while another finds the set: up to which operation all mates have read. 0 where that is
// not worth looking; then WaitReusable does.
__device__ inline uint64_t ReadByMates(const DeviceRank& rank, SetKind kind) {
  if (rank.shape.node_size > kWarpSize) return 0;
  const uint32_t peer = rank.node_begin + LaneId();
  uint64_t read = ~uint64_t{0};
  if (LaneId() < rank.shape.node_size && peer != rank.rank) {
    read =
        LoadAcquireSys(OwnHeapAt<uint64_t>(rank, ConsumedOffset(rank, kind)) + peer) >> kCallBits;
  }
  for (uint32_t mask = kWarpSize / 2; mask > 0; mask /= 2) {
    const uint64_t other = FromLaneXor(read, mask);
    read = other < read ? other : read;
  }
  return read;
}

// What a block knows of its call; shared.
struct BlockCall {
  CallSlot slot;
  uint64_t read_by_mates;  // of a block that will write to the set
};

// All threads of every block: begins an operation with a set. epoch_in: of a done.
__device__ inline void BeginCall(const DeviceRank& rank, SetKind kind, CallPart part,
                                 Operation operation, const int32_t* epoch_in, bool is_sender,
                                 BlockCall& call) {
  if (threadIdx.x == kSlotWarp * kWarpSize) {
    const bool has_failed = SawFailure(rank);
    call.slot = part == CallPart::kDone ? FindOpenSet(rank, kind, operation, *epoch_in)
                                        : FindFreeSet(rank, kind, operation);
    if (has_failed) call.slot.is_ok = 0;  // one answer for the whole block
  }
  BeginSetOperation(rank, operation);
  if (is_sender && WarpId() == kReadWarp) {
    const uint64_t read = ReadByMates(rank, kind);
    if (LaneId() == 0) call.read_by_mates = read;
  }
  SyncBlock();
  if (call.slot.is_ok != 0) SignalLastRead(rank, kind, part);
}

// All threads of the block; `shared_flag` is in shared memory. True: the set may be written at
// every mate.
__device__ inline bool WaitReusable(const DeviceRank& rank, SetKind kind, Operation operation,
                                    const BlockCall& call, uint32_t* shared_flag) {
  if (call.slot.reusable_at <= call.read_by_mates) return true;
  return BlockWaitMates(rank, ConsumedOffset(rank, kind), {operation, WaitPhase::kReuse},
                        ReadFlag(call.slot.reusable_at), shared_flag);
}

// One thread, at the end of the operation `sequence` with a set, or when all blocks have found it.
__device__ inline void UpdateSet(const DeviceRank& rank, SetKind kind, CallPart part,
                                 const CallSlot& slot, uint64_t sequence) {
  if (slot.is_ok == 0) return;
  SetState* state = StateOf(rank, kind);
  SlotSet& set = state->sets[slot.set];
  set.started = slot.started;
  set.program = slot.program;
  set.is_open = part == CallPart::kStart ? 1 : 0;
  if (part == CallPart::kStart) return;
  set.done = sequence;
  state->last_done = sequence;
}

}  // namespace jax_ep::gpu
