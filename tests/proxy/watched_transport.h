// WatchedTransport: counts who writes to whom, cuts ranks off, and keeps their writes back.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tests/proxy/forwarding_transport.h"

namespace jax_ep {

// What all endpoints of a group write, and which of them are cut off. Thread rule: any.
class Wire {
 public:
  using Pairs = std::map<std::pair<uint32_t, uint32_t>, uint64_t>;  // (rank, peer) -> writes

  void Count(uint32_t rank, uint32_t peer) {
    std::lock_guard lock(mutex_);
    ++pairs_[{rank, peer}];
  }
  Pairs pairs() {
    std::lock_guard lock(mutex_);
    return pairs_;
  }
  // From now on nothing leaves or reaches it.
  void Cut(uint32_t rank) {
    std::lock_guard lock(mutex_);
    cut_.insert(rank);
  }
  bool IsCut(uint32_t rank) {
    std::lock_guard lock(mutex_);
    return cut_.contains(rank);
  }
  // Until Release its queue is full.
  void Hold(uint32_t rank) {
    std::lock_guard lock(mutex_);
    held_ = rank;
  }
  void Release() {
    std::lock_guard lock(mutex_);
    held_.reset();
  }
  bool IsHeld(uint32_t rank) {
    std::lock_guard lock(mutex_);
    return held_ == rank;
  }

 private:
  std::mutex mutex_;
  Pairs pairs_;
  std::set<uint32_t> cut_;
  std::optional<uint32_t> held_;
};

class WatchedTransport : public ForwardingTransport {
 public:
  // `peers`: ranks in the order in which they will be connected.
  WatchedTransport(std::unique_ptr<Transport> inner, uint32_t rank, std::vector<uint32_t> peers,
                   std::shared_ptr<Wire> wire)
      : ForwardingTransport(std::move(inner)),
        rank_(rank),
        peers_(std::move(peers)),
        wire_(std::move(wire)) {}

  Status PostWrite(const WriteRequest& request) override {
    if (wire_->IsHeld(rank_)) return ResourceExhausted("the queue is full");
    wire_->Count(rank_, peers_[request.peer]);
    if (wire_->IsCut(rank_)) return Status::Ok();
    return ForwardingTransport::PostWrite(request);
  }
  Result<size_t> Poll(std::span<TransportEvent> events) override {
    if (wire_->IsCut(rank_)) return size_t{0};
    return ForwardingTransport::Poll(events);
  }

 private:
  const uint32_t rank_;
  const std::vector<uint32_t> peers_;
  const std::shared_ptr<Wire> wire_;
};

}  // namespace jax_ep
