// GpuCopies: the copies that a GPU rank's proxies ask for, by the GPU library.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "kernels/gpu/memory/device_memory.h"
#include "proxy/base/device_copies.h"

namespace jax_ep {

class GpuCopies : public DeviceCopies {
 public:
  static_assert(kMaxBatches <= gpu::kMaxCopyBatches);

  // On a thread that may change the runtime's current device, as Close.
  static Result<std::unique_ptr<GpuCopies>> Open(const gpu::DeviceMemoryApi& memory, int device) {
    gpu::CopyStream* stream = nullptr;
    if (const char* error = memory.open_copies(device, &stream)) return Internal(error);
    return std::unique_ptr<GpuCopies>(new GpuCopies(memory, stream));
  }
  ~GpuCopies() override { static_cast<void>(Close()); }

  // What Find says; before the first copy.
  void Map(std::string name, std::span<std::byte> memory) { mapped_[std::move(name)] = memory; }

  // Waits for what is under way. Nobody starts copies any more. Idempotent.
  Status Close() {
    gpu::CopyStream* const stream = std::exchange(stream_, nullptr);
    return stream == nullptr ? Status::Ok() : Said(memory_.close_copies(stream));
  }

  std::span<std::byte> Find(std::string_view name) const override {
    const auto found = mapped_.find(name);
    return found == mapped_.end() ? std::span<std::byte>() : found->second;
  }
  Status Start(std::byte* to, const std::byte* from, uint64_t bytes) override {
    return Said(memory_.start_copy(stream_, to, from, bytes));
  }
  Status EndBatch() override { return Said(memory_.end_batch(stream_)); }
  Result<uint64_t> NewestDone() override {
    uint64_t number = 0;
    JAX_EP_RETURN_IF_ERROR(Said(memory_.newest_batch(stream_, &number)));
    return number;
  }

 private:
  GpuCopies(const gpu::DeviceMemoryApi& memory, gpu::CopyStream* stream)
      : memory_(memory), stream_(stream) {}

  static Status Said(const char* error) {
    return error == nullptr ? Status::Ok() : Internal(error);
  }

  const gpu::DeviceMemoryApi& memory_;
  gpu::CopyStream* stream_;  // null: closed
  std::map<std::string, std::span<std::byte>, std::less<>> mapped_;
};

}  // namespace jax_ep
