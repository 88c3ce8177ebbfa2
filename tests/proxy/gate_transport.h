// GateTransport: wraps a transport so that a test decides what the proxy gets to see: it can hold
// back local completions or arrivals, inject arrivals that nobody sent, and choose how writes to a
// peer are answered.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "tests/proxy/forwarding_transport.h"

namespace jax_ep {

// The switches, shared with the test. Thread rule: any.
class Gate {
 public:
  void HoldSent(bool hold) {
    Locked([&] { hold_sent_ = hold; });
  }
  void HoldArrivals(bool hold) {
    Locked([&] { hold_arrivals_ = hold; });
  }
  void Inject(uint32_t immediate) {
    Locked([&] {
      injected_.push_back(
          TransportEvent{.kind = TransportEvent::Kind::kArrived, .immediate = immediate});
    });
  }
  // The answer of every later PostWrite to this peer (handle of Connect).
  void Answer(uint32_t peer, Status status) {
    Locked([&] { answers_.insert_or_assign(peer, std::move(status)); });
  }
  // The answer of every later PostWrite and Poll; OK restores.
  void Break(Status status) {
    Locked([&] { broken_ = std::move(status); });
  }

 private:
  friend class GateTransport;

  template <typename Body>
  void Locked(Body&& body) {
    std::lock_guard lock(mutex_);
    body();
  }

  std::mutex mutex_;
  bool hold_sent_ = false;
  bool hold_arrivals_ = false;
  std::deque<TransportEvent> injected_;
  std::map<uint32_t, Status> answers_;
  Status broken_;
};

class GateTransport : public ForwardingTransport {
 public:
  GateTransport(std::unique_ptr<Transport> inner, std::shared_ptr<Gate> gate)
      : ForwardingTransport(std::move(inner)), gate_(std::move(gate)) {}

  Status PostWrite(const WriteRequest& request) override {
    {
      std::lock_guard lock(gate_->mutex_);
      if (!gate_->broken_.ok()) return gate_->broken_;
      const auto answer = gate_->answers_.find(request.peer);
      if (answer != gate_->answers_.end()) return answer->second;
    }
    return ForwardingTransport::PostWrite(request);
  }
  Result<size_t> Poll(std::span<TransportEvent> events) override {
    TransportEvent polled[16];
    const Result<size_t> num_polled = ForwardingTransport::Poll(polled);
    if (!num_polled.ok()) return num_polled.status();
    std::lock_guard lock(gate_->mutex_);
    if (!gate_->broken_.ok()) return gate_->broken_;
    for (size_t i = 0; i < *num_polled; ++i) held_.push_back(polled[i]);
    size_t count = 0;
    while (count < events.size() && !gate_->injected_.empty()) {
      events[count++] = gate_->injected_.front();
      gate_->injected_.pop_front();
    }
    for (auto it = held_.begin(); it != held_.end() && count < events.size();) {
      const bool is_held =
          it->kind == TransportEvent::Kind::kSent ? gate_->hold_sent_ : gate_->hold_arrivals_;
      if (is_held) {
        ++it;
        continue;
      }
      events[count++] = *it;
      it = held_.erase(it);
    }
    return count;
  }

 private:
  std::shared_ptr<Gate> gate_;
  std::deque<TransportEvent> held_;
};

}  // namespace jax_ep
