// Counters of the proxy thread that other threads may read at any time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "proxy/abi/channel.h"

namespace jax_ep {

// A number with one writer (the proxy thread) and any readers. Relaxed: it orders nothing.
class Counter {
 public:
  Counter() = default;
  Counter(const Counter& other) : value_(other.Get()) {}  // set-up only: before readers exist
  Counter& operator=(const Counter&) = delete;

  uint64_t Get() const { return value_.load(std::memory_order_relaxed); }
  void Set(uint64_t value) { value_.store(value, std::memory_order_relaxed); }
  void Add(uint64_t amount) { Set(Get() + amount); }

 private:
  std::atomic<uint64_t> value_{0};
};

// Totals of the two flows (there and back) between a local rank and a peer on one channel.
struct FlowStats {
  uint32_t team = 0;
  uint32_t rank = 0;  // the local one
  uint32_t peer = 0;
  Channel channel = Channel::kOrder;
  // Sent from rank to peer.
  uint64_t messages = 0;  // posted, control excluded
  uint64_t bytes = 0;
  uint64_t signals = 0;  // count messages included
  uint64_t stalls = 0;   // times that the window was closed when there was something to send
  uint64_t retries = 0;  // times that the transport's queue was full
  // Received by rank from peer.
  uint64_t received = 0;           // distinct messages
  uint64_t reorders = 0;           // messages that came before an earlier one
  uint64_t max_reorder_depth = 0;  // farthest that one came ahead of the expected one
  uint64_t duplicates = 0;         // dropped
};

// Picks flows between a local rank and a peer of its team.
using FlowFilter =
    std::function<bool(uint32_t team, uint32_t rank, uint32_t peer, Channel channel)>;

}  // namespace jax_ep
