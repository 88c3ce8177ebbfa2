// One operation of one rank: flags, bounded waits, commands to other nodes, and the words of its
// failures. Knows nothing of what is exchanged.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/launch.h"
#include "proxy/abi/channel.h"
#include "proxy/abi/command.h"
#include "proxy/base/deadline.h"
#include "proxy/base/status.h"

namespace jax_ep {

// A part of a call, in the trace from here to the end of the scope.
class TracePhase {
 public:
  // `name` must live as long as the process. `peer`: with whom, or TraceEvent::kNobody.
  TracePhase(TraceTrack* track, const char* name, uint32_t peer = TraceEvent::kNobody)
      : track_(track), name_(name), peer_(static_cast<uint16_t>(peer)) {
    if (track_ != nullptr) begin_ns_ = MonotonicNs();
  }
  ~TracePhase() {
    if (track_ == nullptr) return;
    track_->Add({.begin_ns = begin_ns_,
                 .end_ns = MonotonicNs(),
                 .peer = peer_,
                 .kind = TraceKind::kPhase,
                 .name = track_->NameIndex(name_)});
  }
  TracePhase(const TracePhase&) = delete;
  TracePhase& operator=(const TracePhase&) = delete;

 private:
  TraceTrack* const track_;
  const char* const name_;
  const uint16_t peer_;
  uint64_t begin_ns_ = 0;
};

// Lives on the executor's stack during one launcher call.
class Operation {
 public:
  // `name` is for messages ("dispatch"); it must outlive the operation.
  Operation(Rank& rank, std::string_view name);

  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  Rank& rank() const { return rank_; }
  const GroupShape& shape() const { return rank_.shape; }
  const HeapLayout& layout() const { return rank_.layout; }
  uint64_t epoch() const { return epoch_; }
  void set_epoch(uint64_t epoch) {
    epoch_ = epoch;
    activity().epoch.store(epoch, std::memory_order_relaxed);
  }

  bool is_mate(uint32_t peer) const { return rank_.heaps[peer] != nullptr; }
  bool is_active(uint32_t peer) const { return rank_.is_active(peer); }
  std::byte* heap(uint32_t mate) const { return rank_.heaps[mate]; }
  std::byte* own_heap() const { return rank_.heaps[rank_.rank]; }
  // The rank of this node in whose heap arrives what `source` sends to this rank.
  uint32_t ReceiverOf(Channel channel, uint32_t source) const {
    return shape().receiver_of(channel, rank_.rank, source);
  }

  // The failure that another thread latched, with this operation's name in front, or OK.
  Status CheckLatch() const;
  // Latches `status` with this operation's name in front, and returns it. `blamed` is as in
  // FailureLatch::Set.
  Status Fail(const Status& status, int64_t blamed = FailureLatch::kNobody) const;
  // A caller's mistake: Fail with kInvalidArgument.
  Status Invalid(std::string message) const;
  // OK if `wrong`, what a check of the operands has found, is empty; else Invalid.
  Status Require(std::string wrong) const;
  // What to return when the buffers that `owner` has published are gone: why the group has failed.
  Status OwnerLeft(uint32_t owner) const;

  // flag[channel][source] in the heap of ReceiverOf. Acquire pairs with the release of Signal
  // there, or of that rank's proxy.
  uint64_t ReadFlag(Channel channel, uint32_t source) const;
  // Waits until that flag has reached `value`.
  Status WaitFlag(Channel channel, uint32_t source, uint64_t value);
  // The same for each node-mate (self excluded), for the ranks of equal local index in other nodes,
  // or for every other rank; here and below, for the active ones.
  Status WaitMates(Channel channel, uint64_t value);
  Status WaitRails(Channel channel, uint64_t value);
  Status WaitAll(Channel channel, uint64_t value);

  // Sets flag[channel][this rank] of `peer` to `value`: a release store inside the node, a kSignal
  // command outside it.
  Status Signal(uint32_t peer, Channel channel, uint64_t value);
  Status SignalMates(Channel channel, uint64_t value);
  Status SignalRails(Channel channel, uint64_t value);
  Status SignalAll(Channel channel, uint64_t value);

  // Pushes a command, waiting while the ring is full.
  Status Push(const Command& command);
  // Tells the proxy if commands were pushed since the last call.
  void KickProxy();

 private:
  std::string Where() const;
  void StallForTests(Channel channel);
  void TraceSignal(uint32_t peer, Channel channel, uint64_t value) const;
  void Trace(TraceKind kind, uint64_t begin_ns, uint64_t end_ns, uint32_t peer, Channel channel,
             uint64_t value, uint32_t flag_rank) const;
  Activity& activity() const { return reinterpret_cast<ControlBlock*>(own_heap())->activity; }

  Rank& rank_;
  std::string_view name_;
  Deadline deadline_;
  uint64_t epoch_ = 0;
  bool has_unannounced_commands_ = false;
};

// The slot sets of one kind of call (see Rank::SlotSet).
struct SlotKind {
  uint64_t Rank::Epochs::* started;
  uint64_t Rank::Epochs::* done;
  Rank::SlotSets Rank::* sets;
  uint64_t Rank::Epochs::* rounds;
};
extern const SlotKind kDispatchKind, kCombineKind, kLlDispatchKind, kLlCombineKind;

// What a call got from BeginCall or OpenCall.
struct CallSlot {
  uint32_t set = 0;
  // The *Done flags of all readers must have reached this before the set is written.
  uint64_t reusable_at = 0;
};

// Starts the next epoch of `kind` in a set that is not open. kFailedPrecondition if all are.
Result<CallSlot> BeginCall(Operation& op, const SlotKind& kind);
// Finds the set that still holds the open `epoch`. kFailedPrecondition if none does.
Result<CallSlot> OpenCall(Operation& op, const SlotKind& kind, uint64_t epoch);
// The number that this done will have; every rank gets the same.
uint64_t NextDoneSeq(const Operation& op, const SlotKind& kind);
// Gives the set back. Call after the *Done signals.
void EndCall(Operation& op, const SlotKind& kind, uint32_t set);

// Adds rows or messages that went to other nodes to the rank's counters.
void CountSent(Rank& rank, uint64_t num_rows, uint64_t num_bytes);

// True if every node-mate lives in this process. Equal on all ranks of a node.
bool IsNodeInProcess(const Rank& rank);

// Typed access to a heap.
template <typename T>
T* HeapAt(std::byte* heap, uint64_t offset) {
  return reinterpret_cast<T*>(heap + offset);
}

// A whole call is both of its halves.
template <typename Call>
Status RunBothHalves(Call&& call) {
  uint64_t epoch = 0;
  JAX_EP_RETURN_IF_ERROR(call.Send(&epoch));
  return call.Receive(epoch);
}

}  // namespace jax_ep
