#include "xla_ffi/order.h"

#include <cstddef>

#include "proxy/abi/command.h"

namespace jax_ep {
namespace {

constexpr uint64_t kEntryMask = kOrderLogEntries - 1;
static_assert((kOrderLogEntries & kEntryMask) == 0, "positions are masked");
static_assert(sizeof(OrderEntry) == 16, "an entry is one 16-byte write");

}  // namespace

AgreedOrder::AgreedOrder(Rank& rank) : rank_(rank) {}

uint32_t AgreedOrder::announcer() const {
  for (uint32_t node = 0; node < rank_.shape.num_nodes(); ++node) {
    const uint32_t leader = rank_.leader_of(node);
    if (leader != rank_.shape.num_ranks) return leader;
  }
  return rank_.rank;
}

ControlBlock& AgreedOrder::control(uint32_t rank) const {
  return *reinterpret_cast<ControlBlock*>(rank_.heaps[rank]);
}

void AgreedOrder::RingNodeMates() const {
  for (uint32_t mate = rank_.node_begin(); mate < rank_.node_begin() + rank_.shape.node_size;
       ++mate) {
    if (mate != rank_.rank && rank_.is_active(mate)) control(mate).doorbell.Ring();
  }
}

Status AgreedOrder::Announce(const OrderEntry& entry) {
  // A slot is reused kOrderLogEntries calls later. No rank can be that far behind: a call ends only
  // when every rank takes part in it, and at most 3 * depth halves can be open.
  ControlBlock& log = control(rank_.leader());
  uint64_t expected = next_;
  // Relaxed: the claim orders nothing, it only picks who writes the entry. Should that process die
  // right here, the monitors see it and fail the group.
  if (!log.order_claimed.compare_exchange_strong(expected, next_ + 1, std::memory_order_relaxed)) {
    return Status::Ok();
  }
  log.order[next_ & kEntryMask] = entry;
  // Release: pairs with the acquire in Peek; publishes the entry.
  log.order_count.store(next_ + 1, std::memory_order_release);
  RingNodeMates();
  return rank_.ring.memory == nullptr ? Status::Ok() : SendToLeaders();
}

Status AgreedOrder::SendToLeaders() {
  const uint64_t offset = offsetof(ControlBlock, order) + (next_ & kEntryMask) * sizeof(OrderEntry);
  const Deadline deadline = Deadline::After(rank_.timeout);
  for (uint32_t node = 0; node < rank_.shape.num_nodes(); ++node) {
    const uint32_t leader = rank_.leader_of(node);
    if (node == rank_.node() || leader == rank_.shape.num_ranks) continue;
    const std::optional<PackedCommand> packed = TryPack(Command{.op = Op::kWriteSignal,
                                                                .dst_rank = leader,
                                                                .length_bytes = sizeof(OrderEntry),
                                                                .local_offset = offset,
                                                                .remote_offset = offset,
                                                                .channel = Channel::kOrder,
                                                                .epoch = next_ + 1,
                                                                .value = 0});
    if (!packed.has_value()) return Internal("an order announcement does not fit a command");
    while (!rank_.ring.TryPush(*packed)) {
      rank_.proxy->Kick();
      if (rank_.failure->failed()) return rank_.failure->status();
      if (deadline.expired()) {
        return DeadlineExceeded("group " + rank_.group_name +
                                ": the command ring stayed full while announcing a call");
      }
      std::this_thread::yield();
    }
  }
  rank_.proxy->Kick();
  return Status::Ok();
}

std::optional<OrderEntry> AgreedOrder::Peek() {
  const uint32_t leader = rank_.leader();
  ControlBlock& log = control(leader);
  if (comes_by_proxy()) {
    // The proxy counts them in the flag.
    const auto& arrived =
        rank_.layout.FlagIn(rank_.heaps[rank_.rank], Channel::kOrder, announcer());
    const uint64_t count = arrived.load(std::memory_order_acquire);
    if (count > log.order_count.load(std::memory_order_relaxed)) {
      log.order_count.store(count, std::memory_order_release);
      RingNodeMates();
    }
  }
  if (log.order_count.load(std::memory_order_acquire) <= next_) return std::nullopt;
  return log.order[next_ & kEntryMask];
}

}  // namespace jax_ep
