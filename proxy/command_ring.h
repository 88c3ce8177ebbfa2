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
  // `num_slots` is a power of two of at least 2. `memory`: BytesFor(num_slots) that outlive the
  // ring and begin on a cache line, or empty: the ring has its own. In memory of the caller, which
  // GPU kernels write too, producers may keep their counters elsewhere: `head` is not looked at.
  static Result<std::unique_ptr<CommandRing>> Create(uint32_t num_slots,
                                                     std::span<std::byte> memory = {});
  static constexpr size_t BytesFor(uint32_t num_slots) {
    const size_t num_bytes = sizeof(RingMemory) + num_slots * sizeof(RingSlot);
    return (num_bytes + alignof(RingMemory) - 1) & ~(alignof(RingMemory) - 1);
  }

  RingView view() { return RingView{.memory = memory_}; }

  // Moves the oldest commands into `out` (lap bits clear) and returns how many.
  size_t PopBatch(std::span<PackedCommand> out);

  // Commands popped since creation. Any thread.
  uint64_t num_popped() const { return memory_->tail.load(std::memory_order_relaxed); }
  // Commands that wait here: as many as producers have claimed, or, in memory of the caller,
  // whether there is one. The popping thread.
  uint64_t num_queued() const;

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };

  CommandRing(RingMemory* memory, std::unique_ptr<std::byte, Free> own)
      : memory_(memory), own_(std::move(own)) {}
  bool IsFresh(uint64_t commit) const {
    return (commit & kCommandLapMask) == memory_->LapBit(next_);
  }

  RingMemory* const memory_;
  const std::unique_ptr<std::byte, Free> own_;  // null: memory of the caller
  uint64_t next_ = 0;                           // position of the next command
};

}  // namespace jax_ep
