// DeviceCopies: what a transport between GPUs of one host needs of whoever knows their runtime,
// since the proxy knows none. One per endpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "proxy/base/status.h"

namespace jax_ep {

// Thread rule: one call at a time. No call waits for a copy.
class DeviceCopies {
 public:
  virtual ~DeviceCopies() = default;

  // The memory that a peer has registered under that MemoryRegion::export_blob, as this process has
  // mapped it; empty: nowhere.
  virtual std::span<std::byte> Find(std::string_view export_blob) const = 0;

  // Begins a copy of what GPUs have written and made visible to the host before. Copies may run in
  // any order, and beside kernels.
  // \error kInternal  the runtime's words
  virtual Status Start(std::byte* to, const std::byte* from, uint64_t bytes) = 0;
  // Ends a batch: numbers what was started since the last one 1, 2, 3, ... At most kMaxBatches are
  // under way.
  virtual Status EndBatch() = 0;
  static constexpr uint32_t kMaxBatches = 2;
  // The newest batch of which, and of all before it, every byte is at its place.
  virtual Result<uint64_t> NewestDone() = 0;
};

}  // namespace jax_ep
