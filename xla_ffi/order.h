// The agreed order of one team (architecture.md "The agreed order"): rank 0 announces its calls in
// the order in which they reached it; every other rank executes in that order.
//
// Announcements are entries of the order log in the control block of each node's leader (local rank
// 0). Rank 0 writes its own node's log and sends each entry to the other leaders through the ring
// (channel kOrder); a leader makes an entry visible to its node-mates when it reads it itself.
#pragma once

#include <atomic>
#include <optional>

#include "kernels/launch.h"

namespace jax_ep {

// Thread rule: owned by the rank's executor. The Rank must outlive it.
class AgreedOrder {
 public:
  explicit AgreedOrder(Rank& rank);

  bool announces() const { return rank_.rank == 0; }

  // Rank 0 only: appends `entry` to the order. Blocks (bounded by the rank's timeout) only while
  // the ring to the proxy is full.
  Status Announce(const OrderEntry& entry);

  // Other ranks: the next entry to execute, if it has been announced. Advance consumes it.
  std::optional<OrderEntry> Peek();
  void Advance() { ++next_; }
  uint64_t position() const { return next_; }

 private:
  ControlBlock& control(uint32_t rank) const;
  void RingNodeMates() const;

  Rank& rank_;
  uint64_t next_ = 0;  // entries announced (rank 0) or executed (others)
};

}  // namespace jax_ep
