// ForwardingTransport: what every wrapper of a transport leaves to it. A test overrides the rest.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "proxy/transport.h"

namespace jax_ep {

class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}

  const TransportCaps& Caps() const override { return inner_->Caps(); }
  std::string LocalAddress() const override { return inner_->LocalAddress(); }
  Result<uint32_t> Connect(std::string_view address, Deadline deadline) override {
    return inner_->Connect(address, deadline);
  }
  Result<LocalRegion> Register(const MemoryRegion& region) override {
    return inner_->Register(region);
  }
  Result<uint32_t> ImportRemoteKey(uint32_t peer, std::string_view key) override {
    return inner_->ImportRemoteKey(peer, key);
  }
  Status PostWrite(const WriteRequest& request) override { return inner_->PostWrite(request); }
  Result<bool> Flush(uint64_t token) override { return inner_->Flush(token); }
  Result<size_t> Poll(std::span<TransportEvent> events) override { return inner_->Poll(events); }
  bool PrepareToSleep() override { return inner_->PrepareToSleep(); }

 private:
  std::unique_ptr<Transport> inner_;
};

}  // namespace jax_ep
