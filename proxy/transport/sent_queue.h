// SentQueue: the kSent events of writes that completed inside PostWrite, until Poll reports them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "proxy/transport.h"

namespace jax_ep {

// Bounded: a full queue makes PostWrite answer kResourceExhausted, as a NIC's send queue does.
class SentQueue {
 public:
  SentQueue() : tokens_(kMaxEntries) {}

  static constexpr uint64_t kMaxEntries = 1024;  // power of two

  bool full() const { return pushed_ - popped_ == kMaxEntries; }
  void Push(uint64_t token) { tokens_[pushed_++ % kMaxEntries] = token; }

  // Moves as many as fit into `events`; returns how many.
  size_t PopInto(std::span<TransportEvent> events) {
    size_t count = 0;
    for (; count < events.size() && popped_ != pushed_; ++count) {
      events[count] = TransportEvent{.kind = TransportEvent::Kind::kSent,
                                     .token = tokens_[popped_++ % kMaxEntries]};
    }
    return count;
  }

 private:
  std::vector<uint64_t> tokens_;
  uint64_t pushed_ = 0;
  uint64_t popped_ = 0;
};

}  // namespace jax_ep
