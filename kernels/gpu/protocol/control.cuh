// kernels/gpu/protocol: who may write what, and when.
//   In: a rank's view of the heaps (DeviceRank). Out: flags, slot sets, row index, failed ranks.
//   Waits: readers for the writer's flag; writers of a set for the flag of its last readers.
//
// How ranks wait for each other and how they give up. Every wait has a deadline; whoever gives up
// tells its peers and the host, and stays failed.
//
// Operations of a rank run one after the other on its stream and are numbered alike on all ranks.
// A flag carries the number of the operation that wrote it, its kind, and a fingerprint of the
// program that it is a call of (FlagValue): a peer in the same operation of another program has a
// flag that is neither older nor newer nor equal, and the wait ends with kWrongOrder. Between nodes
// two kinds of flags count steps in place of operations (network/steps.cuh).
#pragma once

#include <cstdint>

#include "kernels/gpu/device/memory_order.cuh"
#include "kernels/gpu/device/warp.cuh"
#include "kernels/gpu/protocol/device_rank.h"

namespace jax_ep::gpu {

// Of a rank of this node.
template <typename T>
__device__ inline T* HeapAt(const DeviceRank& rank, uint32_t owner, uint64_t offset) {
  return reinterpret_cast<T*>(rank.peers[owner - rank.node_begin].heap + offset);
}
template <typename T>
__device__ inline T* OwnHeapAt(const DeviceRank& rank, uint64_t offset) {
  return HeapAt<T>(rank, rank.rank, offset);
}
__device__ inline Control* ControlOf(const DeviceRank& rank) {
  return OwnHeapAt<Control>(rank, rank.layout.control);
}
// Number of the running operation. Plain load: the operation changes it when all of its blocks have
// read it.
__device__ inline uint64_t SequenceOf(const DeviceRank& rank) {
  return ControlOf(rank)->sequence + 1;
}
// Blocks of an operation with an open end (open_end.cuh) are still at work, though another may have
// begun.
__device__ inline bool HasOpenBlocks(const DeviceRank& rank) {
  const Control* control = ControlOf(rank);
  return static_cast<int32_t>(LoadRelaxedGpu(&control->blocks_ended) -
                              LoadRelaxedGpu(&control->blocks_before)) < 0;
}
// For reports, at any time: SequenceOf, also where that has moved on.
__device__ inline uint64_t ReportedSequence(const DeviceRank& rank) {
  return ControlOf(rank)->sequence + (HasOpenBlocks(rank) ? 0 : 1);
}
// True: nothing of any heap may be touched but the kept bytes of this rank's own (heap_layout.h).
__device__ inline bool HasFailed(const DeviceRank& rank) {
  return LoadRelaxedGpu(&ControlOf(rank)->failed) != 0;
}

// Ranks that this one reaches by load and store: [node_begin, MatesEnd).
__device__ inline uint32_t MatesEnd(const DeviceRank& rank) {
  return rank.node_begin + rank.shape.node_size;
}
__device__ inline bool IsMate(const DeviceRank& rank, uint32_t peer) {
  return peer - rank.node_begin < rank.shape.node_size;
}

// Ranks that take no part (elastic groups) send nothing, and yet kernels wait for all ranks alike:
// what a rank sends to such a peer goes to its own heap, as if the peer had sent it. It must say
// that the peer has nothing, so whoever sends counts, ids or drops sends none (IsActive). Rows and
// partials need no such care: nobody routes to that peer (check_active.cu).
__device__ inline bool IsActive(const DeviceRank& rank, uint32_t peer) {
  const uint32_t local = peer - rank.node_begin;
  return local >= kMaxNodeRanks || (rank.active >> local & 1) != 0;
}
// By which number the heap of a mate knows what this rank sends there.
__device__ inline uint32_t SenderTo(const DeviceRank& rank, uint32_t peer) {
  return IsActive(rank, peer) ? rank.rank : peer;
}

// A shared word of each block: whether it has found the rank's first failure, or has left out
// something because the rank had failed (open_end.cuh).
__device__ inline uint32_t* GaveUpHere() {
  __shared__ uint32_t gave_up;
  return &gave_up;
}

// One thread of a block that leaves its work undone if the rank has failed.
__device__ inline bool SawFailure(const DeviceRank& rank) {
  if (!HasFailed(rank)) return false;
  *GaveUpHere() = 1;
  return true;
}

// One thread. The first failure of the rank is reported to the host, which tells other nodes, and
// to all mates. Not inline: kernels of microseconds wait for their own code, so it must be short.
__device__ __noinline__ inline void Fail(const DeviceRank& rank, FailureKind kind,
                                         Operation operation, uint32_t peer, uint64_t expected,
                                         uint64_t actual) {
  if (atomicCAS(&ControlOf(rank)->failed, 0u, 1u) != 0) return;
  *GaveUpHere() = 1;
  RankStatus* status = rank.status;
  status->kind = static_cast<uint32_t>(kind);
  status->operation = static_cast<uint32_t>(operation);
  status->peer = peer;
  status->epoch = ReportedSequence(rank);
  status->expected = expected;
  status->actual = actual;
  // Publishes the fields above to the host.
  StoreReleaseSys(reinterpret_cast<uint32_t*>(&status->failed), 1u);
  for (uint32_t other = rank.node_begin; other < MatesEnd(rank); ++other) {
    if (other == rank.rank || !IsActive(rank, other)) continue;
    StoreReleaseSys(HeapAt<uint32_t>(rank, other, rank.layout.peer_failed), rank.rank + 1);
  }
}

// A relaxed store to mapped memory.
template <typename T>
__device__ inline void TellHost(std::atomic<T>& word, T value) {
  *reinterpret_cast<volatile T*>(&word) = value;
}

// One thread that has waited since `since_ns` tells the host for whom. Not inline, as Fail.
__device__ __noinline__ inline void NoteWait(const DeviceRank& rank, Operation operation,
                                             uint32_t peer, uint64_t expected, uint64_t actual,
                                             uint64_t since_ns, uint64_t now_ns) {
  WaitNote& note = rank.status->wait;
  TellHost(note.operation, static_cast<uint32_t>(operation));
  TellHost(note.peer, peer);
  TellHost(note.epoch, ReportedSequence(rank));
  TellHost(note.site, rank.site);
  TellHost(note.expected, expected);
  TellHost(note.actual, actual);
  TellHost(note.waited_ns, now_ns - since_ns);
  TellHost(note.written_ns, now_ns);
}

// Adds to a counter that nobody waits for.
__device__ inline void CountUp(uint64_t* counter, uint64_t amount) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter),
            static_cast<unsigned long long>(amount));
}

// Likewise; keeps a counter that is larger.
__device__ inline void RaiseTo(uint64_t* counter, uint64_t value) {
  atomicMax(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(value));
}

// What is waited for: failures name the operation, statistics the phase.
struct WaitReason {
  __device__ constexpr WaitReason(Operation waiting)  // NOLINT: implicit by design
      : operation(waiting), phase(WaitPhaseOf(waiting)) {}
  __device__ constexpr WaitReason(Operation waiting, WaitPhase of)
      : operation(waiting), phase(of) {}

  Operation operation;
  WaitPhase phase;
};

// Of waits for `peer`, in nanoseconds, as statistics have them.
__device__ inline uint64_t* WaitCounter(const DeviceRank& rank, WaitPhase phase, uint32_t peer) {
  return OwnHeapAt<uint64_t>(rank, rank.layout.wait_ns) +
         static_cast<uint32_t>(phase) * rank.shape.num_ranks + peer;
}

enum class Seen : uint8_t { kTooEarly, kThere, kWrong };

// What SpinOn does if the word is not there at once. Not inline, as Fail: it is in many places, and
// most never come here.
template <typename Judge>
__device__ __noinline__ bool KeepSpinning(const DeviceRank& rank, const uint64_t* word,
                                          uint32_t peer, WaitReason reason, uint64_t wanted,
                                          FailureKind late, Judge judge) {
  constexpr uint32_t kSpinsPerCheck = 64;
  constexpr uint32_t kSpinsPerRareCheck = 4096;
  const uint32_t* peer_failed = OwnHeapAt<uint32_t>(rank, rank.layout.peer_failed);
  // Not of waits that end before the first check, which most do.
  uint64_t since = 0, next_note = 0;
  uint64_t* counter = WaitCounter(rank, reason.phase, peer);
  uint64_t counted_before = 0;
  for (uint32_t spins = 1;; ++spins) {
    const uint64_t seen = LoadAcquireSys(word);
    switch (judge(seen, wanted)) {
      case Seen::kThere:
        // Many threads wait for the same peer at the same time: to the count as it was then, the
        // longest of them adds its time. Of the lanes for which it came now, one. It stores and
        // does not wait.
        if (since != 0 && peer != rank.rank && IsFirstLaneWith(peer)) {
          RaiseTo(counter, counted_before + (ClockNs() - since));
        }
        return true;
      case Seen::kWrong:
        Fail(rank, FailureKind::kWrongOrder, reason.operation, peer, wanted, seen);
        return false;
      case Seen::kTooEarly:
        break;
    }
    if (spins % kSpinsPerCheck != 0) continue;
    // Before all that follows: a closed group's kernels (heap_layout.h) must see that they have
    // failed and touch neither the host's status word, which is freed by then, nor a peer.
    if (SawFailure(rank)) return false;
    // Any peer: one that gave up may have sent the flag that is waited for.
    if (const uint32_t failed = LoadRelaxedSys(peer_failed); failed != 0) {
      Fail(rank, FailureKind::kPeerFailed, reason.operation, failed - 1, wanted, seen);
      return false;
    }
    // The first block reads the host's word often, the others rarely: it may have ended.
    if ((blockIdx.x == 0 || spins % kSpinsPerRareCheck == 0) &&
        LoadRelaxedSys(reinterpret_cast<const uint32_t*>(&rank.status->abort)) != 0) {
      Fail(rank, FailureKind::kAborted, reason.operation, peer, wanted, seen);
      return false;
    }
    const uint64_t now = ClockNs();
    if (since == 0) {
      since = now;
      next_note = now + kLongWaitNs;
      counted_before = LoadRelaxedSys(counter);
    }
    if (now - since > rank.timeout_ns) {
      Fail(rank, late, reason.operation, peer, wanted, seen);
      return false;
    }
    if (now > next_note) {
      NoteWait(rank, reason.operation, peer, wanted, seen, since, now);
      next_note = now + kLongWaitNs;
    }
  }
}

// One thread reads `word` (an acquire) until judge(value, wanted) says that it is there. False:
// this rank has failed, with `late` if that took too long. `peer` and `wanted` are for the report.
template <typename Judge>
__device__ inline bool SpinOn(const DeviceRank& rank, const uint64_t* word, uint32_t peer,
                              WaitReason reason, uint64_t wanted, FailureKind late, Judge judge) {
  if (judge(LoadAcquireSys(word), wanted) == Seen::kThere) return true;
  return KeepSpinning(rank, word, peer, reason, wanted, late, judge);
}

// Of a flag: whether it has reached the operation `wanted`.
__device__ inline Seen JudgeFlag(uint64_t seen, uint64_t wanted) {
  if (seen >> kCallBits < wanted >> kCallBits) return Seen::kTooEarly;
  const bool is_newer = seen >> kCallBits > wanted >> kCallBits;
  return is_newer || seen == wanted ? Seen::kThere : Seen::kWrong;
}

// One thread reads `word` (an acquire) until is_there(value). False: it is not after `patience_ns`.
template <typename IsThere>
__device__ inline bool ComesSoon(const uint64_t* word, uint64_t patience_ns, IsThere&& is_there) {
  constexpr uint32_t kSpinsPerCheck = 8;
  uint64_t since = 0;
  for (uint32_t spins = 1;; ++spins) {
    if (is_there(LoadAcquireSys(word))) return true;
    if (spins % kSpinsPerCheck != 0) continue;
    const uint64_t now = ClockNs();
    if (since == 0) since = now;
    if (now - since > patience_ns) return false;
  }
}
// Of a flag: whether it has reached the operation `wanted`.
__device__ inline bool FlagComesSoon(const uint64_t* flag, uint64_t wanted, uint64_t patience_ns) {
  return ComesSoon(flag, patience_ns,
                   [&](uint64_t seen) { return JudgeFlag(seen, wanted) == Seen::kThere; });
}

// One thread waits until the u64 at `flag` (written by `peer`) has reached the operation `wanted`.
// False: this rank has failed. An acquire: what the peer wrote before the flag can be read.
__device__ inline bool WaitFlag(const DeviceRank& rank, const uint64_t* flag, uint32_t peer,
                                WaitReason reason, uint64_t wanted) {
  return SpinOn(rank, flag, peer, reason, wanted, FailureKind::kTimeout,
                [](uint64_t seen, uint64_t sought) { return JudgeFlag(seen, sought); });
}

// The same for a flag that stands for data which its writer replaces when it uses their place
// again: a newer operation's is wrong, since what it announces is not what is waited for.
__device__ inline bool WaitExactFlag(const DeviceRank& rank, const uint64_t* flag, uint32_t peer,
                                     WaitReason reason, uint64_t wanted) {
  return SpinOn(rank, flag, peer, reason, wanted, FailureKind::kTimeout,
                [](uint64_t seen, uint64_t sought) {
                  if (seen == sought) return Seen::kThere;
                  return seen >> kCallBits < sought >> kCallBits ? Seen::kTooEarly : Seen::kWrong;
                });
}

// One warp whose lanes have waited: whether all were successful. What each has acquired is ordered
// before what any of them does next; a vote alone orders nothing.
__device__ inline bool AllHaveWaited(bool is_ok) {
  const bool result = AllLanes(is_ok);
  SyncWarp();
  return result;
}

// One warp waits for the flags at `flags_offset` ([N], by rank) of the ranks [begin, end).
__device__ inline bool WarpWaitFlags(const DeviceRank& rank, uint64_t flags_offset, uint32_t begin,
                                     uint32_t end, WaitReason reason, uint64_t wanted) {
  const uint64_t* flags = OwnHeapAt<uint64_t>(rank, flags_offset);
  const bool has_failed = HasFailed(rank);  // on its way while the first flag is looked at
  bool is_ok = true;
  for (uint32_t peer = begin + LaneId(); peer < end; peer += kWarpSize) {
    if (peer != rank.rank && is_ok) is_ok = WaitFlag(rank, flags + peer, peer, reason, wanted);
  }
  if (has_failed) *GaveUpHere() = 1;
  return AllHaveWaited(is_ok && !has_failed);
}

// All threads of the block; `is_ok` is a shared word. Every thread may read what those ranks
// published.
__device__ inline bool BlockWaitFlags(const DeviceRank& rank, uint64_t flags_offset, uint32_t begin,
                                      uint32_t end, WaitReason reason, uint64_t wanted,
                                      uint32_t* is_ok) {
  if (WarpId() == 0) {
    const bool waited = WarpWaitFlags(rank, flags_offset, begin, end, reason, wanted);
    if (LaneId() == 0) *is_ok = waited ? 1 : 0;
  }
  SyncBlock();
  const bool result = *is_ok != 0;
  SyncBlock();  // the word can be used again
  return result;
}
// Flags of all ranks. Those of other nodes are set by a kernel of this rank that has met their
// signal (kernels/gpu/network).
__device__ inline bool BlockWaitPeers(const DeviceRank& rank, uint64_t flags_offset,
                                      WaitReason reason, uint64_t wanted, uint32_t* is_ok) {
  return BlockWaitFlags(rank, flags_offset, 0, rank.shape.num_ranks, reason, wanted, is_ok);
}
__device__ inline bool BlockWaitMates(const DeviceRank& rank, uint64_t flags_offset,
                                      WaitReason reason, uint64_t wanted, uint32_t* is_ok) {
  return BlockWaitFlags(rank, flags_offset, rank.node_begin, MatesEnd(rank), reason, wanted, is_ok);
}

// All threads of the block, after a SyncBlock that follows what is to be published (stores of
// other blocks: after LastToArrive, or AwaitMakers of network/send.cuh).
__device__ inline void BlockSignalMates(const DeviceRank& rank, uint64_t flags_offset,
                                        uint64_t value) {
  for (uint32_t peer = rank.node_begin + threadIdx.x; peer < MatesEnd(rank); peer += blockDim.x) {
    if (peer == rank.rank) continue;
    StoreReleaseSys(HeapAt<uint64_t>(rank, peer, flags_offset) + SenderTo(rank, peer), value);
  }
}

// All threads of the block, once per kernel. True in the block that comes last: it sees what the
// others wrote, and the counter is ready for the next kernel.
__device__ inline bool LastToArrive(const DeviceRank& rank, uint32_t* is_last) {
  SyncBlock();
  if (threadIdx.x == 0) {
    uint32_t* arrivals = &ControlOf(rank)->arrivals;
    *is_last = FetchAddAcqRelGpu(arrivals, 1u) == gridDim.x - 1 ? 1 : 0;
    if (*is_last != 0) *arrivals = 0;
  }
  SyncBlock();
  const bool result = *is_last != 0;
  SyncBlock();  // the word can be used again
  return result;
}

// For JAX_EP_TRACE: one thread of the block that begins a kernel that may be an operation's first,
// and one of its last block. Nothing is written after the group is closed, when the slots are
// freed.
__device__ __noinline__ inline void WriteStampBegin(const DeviceRank& rank, Operation operation) {
  const uint64_t sequence = SequenceOf(rank);
  if (HasFailed(rank) || ControlOf(rank)->stamped == sequence) return;
  ControlOf(rank)->stamped = sequence;
  OperationStamp& stamp = rank.stamps[sequence % kStampSlots];
  TellHost(stamp.operation, static_cast<uint64_t>(operation));
  TellHost(stamp.site, rank.site);
  TellHost(stamp.begin_ns, ClockNs());
}
__device__ inline void StampBegin(const DeviceRank& rank, Operation operation) {
  if (rank.stamps != nullptr) WriteStampBegin(rank, operation);
}
__device__ __noinline__ inline void WriteStampEnd(const DeviceRank& rank, uint64_t sequence) {
  if (HasFailed(rank)) return;
  OperationStamp& stamp = rank.stamps[sequence % kStampSlots];
  TellHost(stamp.end_ns, ClockNs());
  StoreReleaseSys(reinterpret_cast<uint64_t*>(&stamp.epoch), sequence);
}

// One thread of an operation's first kernel. False: another call is running, so this rank has
// failed.
__device__ inline bool TakeBusyWord(const DeviceRank& rank, Operation operation) {
  StampBegin(rank, operation);
  const uint32_t before = atomicExch(&ControlOf(rank)->busy, 1u);
  if (before == 0 && !HasOpenBlocks(rank)) return true;
  Fail(rank, FailureKind::kBusy, operation, rank.rank, 0, before);
  return false;
}

// The same by one thread of each block of the operation `sequence`, whichever is first; `launch` as
// in Entry.
__device__ inline bool ShareBusyWord(const DeviceRank& rank, Operation operation, uint64_t sequence,
                                     uint32_t launch) {
  const bool has_open_blocks = HasOpenBlocks(rank);  // on its way while the word is taken
  const uint32_t before = atomicCAS(&ControlOf(rank)->busy, 0u, launch);
  // Another call may have ended since this block has read which one it is.
  const bool is_next = LoadRelaxedSys(&ControlOf(rank)->sequence) + 1 == sequence;
  if (before == 0) StampBegin(rank, operation);
  if ((before == 0 || before == launch) && is_next && !has_open_blocks) return true;
  Fail(rank, FailureKind::kBusy, operation, rank.rank, 0, before);
  return false;
}

// One thread, at the beginning of an operation. A peer that has failed fails this rank, also if it
// waits for nothing more from that peer.
__device__ inline void FailAfterPeer(const DeviceRank& rank, Operation operation) {
  const uint32_t failed = LoadRelaxedSys(OwnHeapAt<uint32_t>(rank, rank.layout.peer_failed));
  if (failed != 0) Fail(rank, FailureKind::kPeerFailed, operation, failed - 1, 0, failed);
}

// One thread of the operation `sequence`, of the last block to end or to read what this writes. It
// reads nothing, since all may wait for it.
__device__ inline void EndOperation(const DeviceRank& rank, uint64_t sequence) {
  if (rank.stamps != nullptr) WriteStampEnd(rank, sequence);
  Control* control = ControlOf(rank);
  control->sequence = sequence;
  control->busy = 0;
}

// All threads of the block: what outputs hold after a failure.
__device__ inline void PoisonBytes(void* array, uint64_t num_bytes) {
  // 0xff bytes are NaN in every float type and -1 in integers.
  auto* bytes = static_cast<uint8_t*>(array);
  if (bytes == nullptr) return;
  const uint64_t words = reinterpret_cast<uintptr_t>(array) % 16 == 0 ? num_bytes / 16 : 0;
  const uint4 ones = {~0u, ~0u, ~0u, ~0u};
  for (uint64_t i = threadIdx.x; i < words; i += blockDim.x) {
    reinterpret_cast<uint4*>(bytes)[i] = ones;
  }
  for (uint64_t i = words * 16 + threadIdx.x; i < num_bytes; i += blockDim.x) bytes[i] = 0xff;
}
__device__ inline void ZeroInts(int32_t* array, uint64_t count) {
  for (uint64_t i = threadIdx.x; i < count; i += blockDim.x) array[i] = 0;
}

}  // namespace jax_ep::gpu
