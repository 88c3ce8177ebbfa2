// CommandRing: the consumer's end of a command ring and the owner of its memory. The producers' end
// is RingView in proxy/abi/ring.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "proxy/abi/ring.h"
#include "proxy/base/status.h"

namespace jax_ep {

// Thread rule: one thread pops at a time. Views must not outlive the ring.
class CommandRing {
 public:
  // `num_slots` is a power of two of at least 2.
  static Result<std::unique_ptr<CommandRing>> Create(uint32_t num_slots);

  RingView view() { return RingView{.memory = memory_.get()}; }

  // Moves the oldest commands into `out` (lap bits clear) and returns how many.
  size_t PopBatch(std::span<PackedCommand> out);

  // Commands popped since creation. Any thread.
  uint64_t num_popped() const { return memory_->tail.load(std::memory_order_relaxed); }
  // Commands that producers have claimed since creation. Any thread.
  uint64_t num_pushed() const { return memory_->head.load(std::memory_order_relaxed); }

 private:
  struct Free {
    void operator()(RingMemory* memory) const;
  };

  explicit CommandRing(std::unique_ptr<RingMemory, Free> memory) : memory_(std::move(memory)) {}

  std::unique_ptr<RingMemory, Free> memory_;
  uint64_t next_ = 0;  // position of the next command
};

}  // namespace jax_ep
