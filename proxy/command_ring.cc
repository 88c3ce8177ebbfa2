#include "proxy/command_ring.h"

#include <bit>
#include <cstdlib>
#include <new>
#include <string>

namespace jax_ep {

void CommandRing::Free::operator()(std::byte* memory) const { std::free(memory); }

Result<std::unique_ptr<CommandRing>> CommandRing::Create(uint32_t num_slots,
                                                         std::span<std::byte> memory) {
  if (num_slots < 2 || !std::has_single_bit(num_slots)) {
    return InvalidArgument("command ring: " + std::to_string(num_slots) +
                           " slots; expected a power of two of at least 2");
  }
  const size_t num_bytes = BytesFor(num_slots);
  std::unique_ptr<std::byte, Free> own;
  std::byte* bytes = memory.data();
  if (memory.empty()) {
    own.reset(static_cast<std::byte*>(std::aligned_alloc(alignof(RingMemory), num_bytes)));
    bytes = own.get();
    if (bytes == nullptr) return ResourceExhausted("command ring: out of memory");
  } else if (memory.size() < num_bytes ||
             reinterpret_cast<uintptr_t>(bytes) % alignof(RingMemory) != 0) {
    return InvalidArgument("command ring: " + std::to_string(memory.size()) + " bytes; expected " +
                           std::to_string(num_bytes) + " at a cache line");
  }
  auto* ring = new (bytes) RingMemory{};
  ring->num_slots = num_slots;
  ring->slots_log2 = static_cast<uint32_t>(std::countr_zero(num_slots));
  for (uint32_t i = 0; i < num_slots; ++i) new (ring->slots() + i) RingSlot{};
  return std::unique_ptr<CommandRing>(new CommandRing(ring, std::move(own)));
}

uint64_t CommandRing::num_queued() const {
  if (own_ != nullptr) return memory_->head.load(std::memory_order_relaxed) - num_popped();
  const RingSlot& slot = memory_->slots()[next_ & (memory_->num_slots - 1)];
  return IsFresh(slot.commit.load(std::memory_order_relaxed)) ? 1 : 0;
}

size_t CommandRing::PopBatch(std::span<PackedCommand> out) {
  const uint64_t mask = memory_->num_slots - 1;
  RingSlot* const slots = memory_->slots();
  size_t count = 0;
  while (count < out.size()) {
    RingSlot& slot = slots[next_ & mask];
    // Acquire pairs with the release of TryPush.
    const uint64_t commit = slot.commit.load(std::memory_order_acquire);
    if (!IsFresh(commit)) break;
    out[count].words[0] = slot.payload.load(std::memory_order_relaxed);
    out[count].words[1] = commit & ~kCommandLapMask;
    ++count;
    ++next_;
  }
  // Release: our reads of the slots come before a producer's next stores to them.
  if (count > 0) memory_->tail.store(next_, std::memory_order_release);
  return count;
}

}  // namespace jax_ep
