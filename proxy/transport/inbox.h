// Inbox: where the memory-copying transports (loopback, shm) deliver immediates. A bounded queue of
// 32-bit values in plain or shared memory, any number of senders, one receiver. A sender that is
// killed or stopped at any instruction leaves it usable: one exchange both claims and fills a slot.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace jax_ep {

// First bytes of the memory; the slots follow. A slot holds its lap + 1 in the high half (so zeroed
// memory is an empty inbox) and the immediate in the low half.
struct InboxHeader {
  uint64_t num_slots;                        // power of two, constant
  alignas(64) std::atomic<uint64_t> head;    // all slots before it are filled (a hint: may lag)
  alignas(64) std::atomic<uint64_t> tail;    // all slots before it were taken
  alignas(64) std::atomic<uint64_t> closed;  // 1: the receiver has gone
};

inline constexpr uint32_t kDefaultInboxSlots = 8192;

constexpr size_t InboxBytes(uint32_t num_slots) {
  return sizeof(InboxHeader) + num_slots * sizeof(std::atomic<uint64_t>);
}

// A handle on an inbox; does not own the memory, which outlives it.
class Inbox {
 public:
  Inbox() = default;

  // `bytes` are zeroes, 64-byte aligned, at least InboxBytes(num_slots).
  static Inbox Create(std::span<std::byte> bytes, uint32_t num_slots) {
    reinterpret_cast<InboxHeader*>(bytes.data())->num_slots = num_slots;
    return Inbox(bytes.data(), num_slots);
  }

  // An inbox made by Create, maybe by another process; nullopt if the size does not fit.
  static std::optional<Inbox> Open(std::span<std::byte> bytes) {
    if (bytes.size() < sizeof(InboxHeader)) return std::nullopt;
    const uint64_t num_slots = reinterpret_cast<InboxHeader*>(bytes.data())->num_slots;
    if (!std::has_single_bit(num_slots) || num_slots > UINT32_MAX ||
        InboxBytes(static_cast<uint32_t>(num_slots)) > bytes.size()) {
      return std::nullopt;
    }
    return Inbox(bytes.data(), num_slots);
  }

  // False if the inbox is full. What the caller wrote before is visible to who takes the value.
  bool TryPush(uint32_t value) {
    while (true) {
      uint64_t head = header_->head.load(std::memory_order_acquire);
      // Acquire pairs with the release in TryPop: the slot's last occupant was read.
      if (head - header_->tail.load(std::memory_order_acquire) >= num_slots_) {
        // `head` may be older than `tail`; then the difference is huge and head has moved.
        if (header_->head.load(std::memory_order_acquire) == head) return false;
        continue;
      }
      std::atomic<uint64_t>& slot = slots_[head & (num_slots_ - 1)];
      const uint64_t lap = (head / num_slots_ + 1) & UINT32_MAX;
      uint64_t current = slot.load(std::memory_order_relaxed);
      if ((current >> kLapShift) == ((lap - 1) & UINT32_MAX)) {
        // Release pairs with the acquire in TryPop. Only the slot's previous lap can be replaced,
        // so a sender that slept here for whole laps fails.
        if (slot.compare_exchange_strong(current, (lap << kLapShift) | value,
                                         std::memory_order_release, std::memory_order_relaxed)) {
          header_->head.compare_exchange_strong(head, head + 1, std::memory_order_release,
                                                std::memory_order_relaxed);
          return true;
        }
      } else if ((current >> kLapShift) == lap) {
        // Filled by a sender that has not moved head yet (it may be dead): do it for them.
        header_->head.compare_exchange_strong(head, head + 1, std::memory_order_release,
                                              std::memory_order_relaxed);
      }
    }
  }

  // Receiver only.
  std::optional<uint32_t> TryPop() {
    const uint64_t tail = header_->tail.load(std::memory_order_relaxed);
    const uint64_t lap = (tail / num_slots_ + 1) & UINT32_MAX;
    const uint64_t slot = slots_[tail & (num_slots_ - 1)].load(std::memory_order_acquire);
    if ((slot >> kLapShift) != lap) return std::nullopt;
    // Senders test head - tail, so head must never be behind tail.
    uint64_t head = header_->head.load(std::memory_order_relaxed);
    if (head == tail) {
      header_->head.compare_exchange_strong(head, tail + 1, std::memory_order_release,
                                            std::memory_order_relaxed);
    }
    header_->tail.store(tail + 1, std::memory_order_release);
    return static_cast<uint32_t>(slot);
  }

  // A hint: false means that a TryPush now would have found it full.
  bool HasRoom() const {
    const uint64_t head = header_->head.load(std::memory_order_relaxed);
    const uint64_t tail = header_->tail.load(std::memory_order_relaxed);
    return head <= tail || head - tail < num_slots_;
  }

  uint64_t num_slots() const { return num_slots_; }

  void Close() { header_->closed.store(1, std::memory_order_release); }
  bool closed() const { return header_->closed.load(std::memory_order_acquire) != 0; }

 private:
  static constexpr int kLapShift = 32;

  Inbox(std::byte* base, uint64_t num_slots)
      : header_(reinterpret_cast<InboxHeader*>(base)),
        slots_(reinterpret_cast<std::atomic<uint64_t>*>(base + sizeof(InboxHeader))),
        num_slots_(num_slots) {}

  InboxHeader* header_ = nullptr;
  std::atomic<uint64_t>* slots_ = nullptr;
  uint64_t num_slots_ = 0;  // a copy: a peer cannot change what we index with
};

}  // namespace jax_ep
