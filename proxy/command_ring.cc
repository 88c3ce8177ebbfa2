#include "proxy/command_ring.h"

#include <bit>
#include <cstdlib>
#include <new>
#include <string>

namespace jax_ep {

void CommandRing::Free::operator()(RingMemory* memory) const { std::free(memory); }

Result<std::unique_ptr<CommandRing>> CommandRing::Create(uint32_t num_slots) {
  if (num_slots < 2 || !std::has_single_bit(num_slots)) {
    return InvalidArgument("command ring: " + std::to_string(num_slots) +
                           " slots; expected a power of two of at least 2");
  }
  const size_t num_bytes = sizeof(RingMemory) + num_slots * sizeof(RingSlot);
  const size_t rounded_bytes = (num_bytes + alignof(RingMemory) - 1) & ~(alignof(RingMemory) - 1);
  void* bytes = std::aligned_alloc(alignof(RingMemory), rounded_bytes);
  if (bytes == nullptr) return ResourceExhausted("command ring: out of memory");
  std::unique_ptr<RingMemory, Free> memory(new (bytes) RingMemory{});
  memory->num_slots = num_slots;
  memory->slots_log2 = static_cast<uint32_t>(std::countr_zero(num_slots));
  for (uint32_t i = 0; i < num_slots; ++i) new (memory->slots() + i) RingSlot{};
  return std::unique_ptr<CommandRing>(new CommandRing(std::move(memory)));
}

size_t CommandRing::PopBatch(std::span<PackedCommand> out) {
  const uint64_t mask = memory_->num_slots - 1;
  RingSlot* const slots = memory_->slots();
  size_t count = 0;
  while (count < out.size()) {
    RingSlot& slot = slots[next_ & mask];
    // Acquire pairs with the release of TryPush.
    const uint64_t commit = slot.commit.load(std::memory_order_acquire);
    if ((commit & kCommandLapMask) != memory_->LapBit(next_)) break;
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
