// The agreed order of one team (docs/architecture.md): an append-only log of calls that every rank
// executes from the front. Who may append: in a team of one node whichever rank first has a call
// that the log does not have yet (so nobody waits for rank 0 to be scheduled); in a team of several
// nodes rank 0.
//
// The log is in the control block of each node's leader (local rank 0). Rank 0 also sends its
// entries to the other leaders through the ring (channel kOrder); a leader makes an entry visible
// to its node-mates when it reads it itself. Where a group goes on without some ranks, the first
// active rank of a node, or of all, stands for its local rank 0, or rank 0.
#pragma once

#include <atomic>
#include <optional>

#include "kernels/launch.h"

namespace jax_ep {

// Thread rule: owned by the rank's executor. The Rank must outlive it.
class AgreedOrder {
 public:
  explicit AgreedOrder(Rank& rank);

  // Whether this rank may append to the log.
  bool can_announce() const { return rank_.shape.num_nodes() == 1 || rank_.rank == announcer(); }

  // Whether entries reach this rank's log through its proxy: the leader of a node without rank 0.
  bool comes_by_proxy() const {
    return leads_node() && rank_.node() != announcer() / rank_.shape.node_size;
  }

  bool leads_node() const { return rank_.rank == rank_.leader(); }

  // Appends `entry` at this rank's position if nothing is there yet; what stands there afterwards,
  // or will in a moment, is for Peek to say. Blocks (bounded by the rank's timeout) only while the
  // ring to the proxy is full.
  Status Announce(const OrderEntry& entry);

  // The next entry to execute, if it has been announced. Advance consumes it.
  std::optional<OrderEntry> Peek();
  void Advance() { ++next_; }
  uint64_t position() const { return next_; }

 private:
  // The first active rank: rank 0 in the terms above.
  uint32_t announcer() const;
  ControlBlock& control(uint32_t rank) const;
  void RingNodeMates() const;
  Status SendToLeaders();  // the entry at next_

  Rank& rank_;
  uint64_t next_ = 0;  // entries executed
};

}  // namespace jax_ep
