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

  // On a thread that may change the runtime's current device, as Warm and Close.
  static Result<std::unique_ptr<GpuCopies>> Open(const gpu::DeviceMemoryApi& memory, int device) {
    std::unique_ptr<GpuCopies> copies(new GpuCopies(memory, device));
    JAX_EP_RETURN_IF_ERROR(Said(memory.open_copies(device, &copies->stream_)));
    return copies;
  }
  ~GpuCopies() override { static_cast<void>(Close()); }

  // What Find says; before the first copy.
  void Map(std::string name, std::span<std::byte> memory) { mapped_[std::move(name)] = memory; }

  // Copies a few bytes of `from` to each of them, on a stream of its own, and waits: what the
  // runtime makes for a first copy is there before kernels wait for one.
  Status Warm(const std::byte* from) {
    GpuCopies first(memory_, device_);
    JAX_EP_RETURN_IF_ERROR(Said(memory_.open_copies(device_, &first.stream_)));
    constexpr uint64_t kFewBytes = 16;
    for (const auto& [name, memory] : mapped_) {
      JAX_EP_RETURN_IF_ERROR(first.Start(memory.data(), from, kFewBytes));
    }
    return first.Close();
  }

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
  GpuCopies(const gpu::DeviceMemoryApi& memory, int device) : memory_(memory), device_(device) {}

  static Status Said(const char* error) {
    return error == nullptr ? Status::Ok() : Internal(error);
  }

  const gpu::DeviceMemoryApi& memory_;
  const int device_;
  gpu::CopyStream* stream_ = nullptr;  // null: closed
  std::map<std::string, std::span<std::byte>, std::less<>> mapped_;
};

}  // namespace jax_ep
