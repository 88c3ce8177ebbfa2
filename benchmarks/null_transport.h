// A transport that does nothing: what a command costs without a network.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "proxy/abi/imm.h"
#include "proxy/transport.h"

namespace jax_ep {

// Completes every write at once and acknowledges it as the peer would, once per poll and flow.
class NullTransport : public Transport {
 public:
  explicit NullTransport(std::atomic<uint64_t>* num_posted) : num_posted_(num_posted) {}

  const TransportCaps& Caps() const override { return caps_; }
  std::string LocalAddress() const override { return "null"; }
  Result<uint32_t> Connect(std::string_view, Deadline) override { return uint32_t{0}; }
  Result<LocalRegion> Register(const MemoryRegion&) override {
    return LocalRegion{.handle = 0, .key = "null"};
  }
  Result<uint32_t> ImportRemoteKey(uint32_t, std::string_view) override { return uint32_t{0}; }
  Result<bool> Flush(uint64_t) override { return true; }

  Status PostWrite(const WriteRequest& request) override {
    const Imm imm = DecodeImm(request.immediate);
    if (imm.kind != ImmKind::kControl) {
      num_posted_->store(num_posted_->load(std::memory_order_relaxed) + 1,
                         std::memory_order_relaxed);
      acknowledged_ = (imm.payload + 1) & (kSequenceSpace - 1);
      flow_ = imm.flow;
      has_news_ = true;
    }
    if (pushed_ - popped_ == kQueue) {
      return Status(StatusCode::kResourceExhausted, "queue full");
    }
    tokens_[pushed_++ % kQueue] = request.token;
    return Status::Ok();
  }

  Result<size_t> Poll(std::span<TransportEvent> events) override {
    size_t count = 0;
    for (; count + 1 < events.size() && popped_ != pushed_; ++count) {
      events[count] =
          TransportEvent{.kind = TransportEvent::Kind::kSent, .token = tokens_[popped_++ % kQueue]};
    }
    if (has_news_) {
      has_news_ = false;
      events[count++] = TransportEvent{
          .kind = TransportEvent::Kind::kArrived,
          .immediate = *TryEncodeImm(Imm{.kind = ImmKind::kControl,
                                         .flow = flow_,
                                         .epoch = static_cast<uint32_t>(ImmControl::kAck),
                                         .payload = acknowledged_})};
    }
    return count;
  }

 private:
  static constexpr size_t kQueue = 1024;
  const TransportCaps caps_{
      .arrival_implies_visible = true, .max_message_bytes = kMaxCommandBytes, .immediate_bits = 32};
  std::atomic<uint64_t>* num_posted_;
  std::array<uint64_t, kQueue> tokens_{};
  uint64_t pushed_ = 0;
  uint64_t popped_ = 0;
  uint32_t acknowledged_ = 0;
  uint32_t flow_ = 0;
  bool has_news_ = false;
};

}  // namespace jax_ep
