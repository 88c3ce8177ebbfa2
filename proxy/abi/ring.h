// The command ring as its producers see it: memory layout and TryPush. The consumer and the owner
// of the memory are in proxy/command_ring.h.
#pragma once

#include <atomic>
#include <cstdint>

#include "proxy/abi/command.h"

namespace jax_ep {

struct RingSlot {
  std::atomic<uint64_t> payload;
  std::atomic<uint64_t> commit;  // carries the lap bit: the only word that says "fresh"
};
static_assert(sizeof(RingSlot) == 16, "a slot is one packed command");

// Header of a ring; the slots follow it. Shared indices sit on their own cache lines.
struct RingMemory {
  uint64_t num_slots;                             // power of two, constant
  uint32_t slots_log2;                            // log2(num_slots)
  alignas(64) std::atomic<uint64_t> head;         // commands claimed by producers
  alignas(64) std::atomic<uint64_t> cached_tail;  // a past value of tail, beside the producers
  alignas(64) std::atomic<uint64_t> tail;         // commands consumed, written by the consumer

  RingSlot* slots() { return reinterpret_cast<RingSlot*>(this + 1); }

  // The lap bit of position `index`. 1 in the first lap, so that zeroed memory is an empty ring.
  uint64_t LapBit(uint64_t index) const {
    return ((~(index >> slots_log2)) & 1) << kCommandLapShift;
  }
};
static_assert(sizeof(RingMemory) % 64 == 0, "the slots start on a cache line");

// A producer's handle. Any number of threads may push; the memory must outlive them.
struct RingView {
  RingMemory* memory = nullptr;

  // Appends a command; false if the ring is full (wait, bounded by a deadline, and try again).
  // After a batch of pushes ring the proxy's bell. Everything that the caller wrote before is
  // visible to the proxy that pops the command.
  bool TryPush(const PackedCommand& command) const {
    RingMemory& ring = *memory;
    uint64_t index = ring.head.load(std::memory_order_relaxed);
    while (true) {
      // Lap parity tells a fresh slot from a stale one but does not keep a producer from
      // overwriting a live one; this does. Acquire pairs with the consumer's release of tail (also
      // through cached_tail): our stores below come after its reads of the slot. The difference is
      // signed because `index` may be older than the tail; then the exchange fails.
      uint64_t tail = ring.cached_tail.load(std::memory_order_acquire);
      if (static_cast<int64_t>(index - tail) >= static_cast<int64_t>(ring.num_slots)) {
        tail = ring.tail.load(std::memory_order_acquire);
        if (static_cast<int64_t>(index - tail) >= static_cast<int64_t>(ring.num_slots)) {
          return false;
        }
        ring.cached_tail.store(tail, std::memory_order_release);
      }
      if (ring.head.compare_exchange_weak(index, index + 1, std::memory_order_relaxed,
                                          std::memory_order_relaxed)) {
        break;
      }
    }
    RingSlot& slot = ring.slots()[index & (ring.num_slots - 1)];
    slot.payload.store(command.words[0], std::memory_order_relaxed);
    // Release pairs with the acquire of PopBatch: who sees the lap bit sees the payload word and
    // the bytes that the command tells to send.
    slot.commit.store((command.words[1] & ~kCommandLapMask) | ring.LapBit(index),
                      std::memory_order_release);
    return true;
  }
};

}  // namespace jax_ep
