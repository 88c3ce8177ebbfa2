// Barriers of all processes: of create_group, and of close.
//
// A process enters one with all of its ranks, so between nodes processes wait for each other, not
// ranks: each tells each other one once for each team, rank to rank as the proxies chose
// (proxy/leads.h). A group that was just created has a connection for each process, not for each
// pair of ranks.
#include <algorithm>
#include <thread>

#include "proxy/abi/command.h"
#include "xla_ffi/session_member.h"

namespace jax_ep {

Status Session::StartProxy() {
  JAX_EP_RETURN_IF_ERROR(proxy_->Start());
  for (const auto& member : members_) {
    member->barrier_peers = proxy_->BarrierPeers(member->endpoint);
    for (const uint32_t peer : member->barrier_peers) {
      leads_[{member->id.team, process_of(member->id.team, peer)}] = {.member = member.get(),
                                                                      .peer = peer};
    }
  }
  return Status::Ok();
}

Status Session::Push(const Rank& rank, const Command& command, const Deadline& deadline) const {
  const auto packed = TryPack(command);
  if (!packed.has_value()) return Internal("group " + options_.name + ": a command does not fit");
  RingView ring = rank.ring;
  while (!ring.TryPush(*packed)) {
    rank.proxy->Kick();
    if (failure_->failed()) return failure_->status();
    if (deadline.expired()) {
      return DeadlineExceeded("group " + options_.name + ": the command ring of " +
                              rank.NameOf(rank.rank) + " stayed full at a barrier");
    }
    std::this_thread::yield();
  }
  return Status::Ok();
}

Status Session::PushToAll(Op op, uint64_t epoch, const Deadline& deadline) const {
  for (const auto& member : members_) {
    const Rank& rank = member->executor->rank();
    JAX_EP_RETURN_IF_ERROR(
        Push(rank, Command{.op = op, .channel = Channel::kBarrier, .epoch = epoch}, deadline));
    rank.proxy->Kick();
  }
  return Status::Ok();
}

Status Session::AwaitQuiet(uint64_t epoch, const Deadline& deadline) const {
  JAX_EP_RETURN_IF_ERROR(PushToAll(Op::kQuiet, epoch, deadline));
  for (const auto& member : members_) {
    const Rank& rank = member->executor->rank();
    const std::atomic<uint64_t>& quiet = *proxy_->quiet_flag(member->endpoint);
    const WaitResult result = WaitUntil(
        member->control_block()->doorbell,
        [&] { return quiet.load(std::memory_order_acquire) >= epoch; }, deadline, *failure_,
        rank.proxy);
    if (result == WaitResult::kFailed) return failure_->status();
    if (result == WaitResult::kTimeout) {
      return DeadlineExceeded("group " + options_.name + ": barrier " + std::to_string(epoch) +
                              " on " + rank.NameOf(rank.rank) +
                              ": what it sent was not acknowledged in time");
    }
  }
  return Status::Ok();
}

Status Session::AwaitBarrierOf(const Member& member, uint32_t peer, uint64_t epoch,
                               std::chrono::nanoseconds limit, const Deadline& deadline) const {
  const Rank& rank = member.executor->rank();
  const auto& flag = layout_.FlagIn(member.heap.bytes().data(), Channel::kBarrier, peer);
  Activity& activity = member.control_block()->activity;
  const uint64_t begin_ns = MonotonicNs();
  activity.Await(Phase::kAwaitsBarrier, begin_ns, peer, Channel::kBarrier, epoch);
  const WaitResult result = WaitUntil(
      member.control_block()->doorbell,
      [&] { return flag.load(std::memory_order_acquire) >= epoch; }, deadline, *failure_,
      rank.heaps[peer] == nullptr ? rank.proxy : nullptr);
  const uint64_t end_ns = MonotonicNs();
  activity.Enter(Phase::kBetweenCalls, end_ns);
  if (member.trace != nullptr && peer != rank.rank) {
    member.trace->Add({.begin_ns = begin_ns,
                       .end_ns = end_ns,
                       .value = epoch,
                       .peer = static_cast<uint16_t>(peer),
                       .kind = TraceKind::kBarrier,
                       .channel = static_cast<uint8_t>(Channel::kBarrier)});
  }
  if (result == WaitResult::kFailed) return failure_->status();
  if (result == WaitResult::kTimeout) {
    return DeadlineExceeded("group " + options_.name + ": barrier " + std::to_string(epoch) +
                            " on " + rank.NameOf(rank.rank) + ": " + rank.NameOf(peer) +
                            " has not arrived within " +
                            std::to_string(std::chrono::duration<double>(limit).count()) + " s");
  }
  return Status::Ok();
}

Status Session::Barrier(std::chrono::nanoseconds limit) {
  const uint64_t epoch = barrier_epoch_.fetch_add(1, std::memory_order_acq_rel) + 1;
  const Deadline deadline = Deadline::After(limit);
  for (const auto& member : members_) {
    const Rank& rank = member->executor->rank();
    for (std::byte* heap : rank.heaps) {
      if (heap == nullptr) continue;
      layout_.FlagIn(heap, Channel::kBarrier, rank.rank).store(epoch, std::memory_order_release);
      reinterpret_cast<ControlBlock*>(heap)->doorbell.Ring();
    }
  }
  if (proxy_ != nullptr) {
    // Everything that any rank here sent has been received when a signal of this process arrives.
    JAX_EP_RETURN_IF_ERROR(AwaitQuiet(epoch, deadline));
    JAX_EP_RETURN_IF_ERROR(PushToAll(Op::kBarrier, epoch, deadline));
  }
  for (const auto& member : members_) {
    const Rank& rank = member->executor->rank();
    const auto& remote = member->barrier_peers;
    for (uint32_t peer = 0; peer < options_.shape.num_ranks; ++peer) {
      if (!rank.is_active(peer)) continue;
      const bool is_lead = std::find(remote.begin(), remote.end(), peer) != remote.end();
      if (rank.heaps[peer] == nullptr && !is_lead) continue;
      JAX_EP_RETURN_IF_ERROR(AwaitBarrierOf(*member, peer, epoch, limit, deadline));
    }
  }
  return Status::Ok();
}

}  // namespace jax_ep
