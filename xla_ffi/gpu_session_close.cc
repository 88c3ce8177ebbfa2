// The end of a GpuSession.
#include <utility>

#include "proxy/base/log.h"
#include "xla_ffi/gpu_member.h"

namespace jax_ep {

void GpuSession::Close(Departure departure) {
  if (!lifecycle_.BeginClose()) return;
  if (monitor_ != nullptr) {
    if (Result<std::vector<RankTotals>> totals = ReadTotals(); totals.ok()) {
      last_.totals = std::move(*totals);
    }
  }
  if (network_ != nullptr) last_.flows = network_->flow_stats();
  last_.data_path = DataPath();
  // From here on no kernel can be launched; those that were are waited for in Free.
  lifecycle_.Seal();
  if (monitor_ != nullptr) monitor_->Leave(departure);
  Free();
  lifecycle_.EndClose();
}

void GpuSession::BeginToAgree() {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  if (lease && monitor_ != nullptr) monitor_->ShowAgreement();
}

void GpuSession::Free() {
  const Status drained = OnOwnThread([&]() -> Status {
    for (const auto& member : members_) {
      JAX_EP_RETURN_IF_ERROR(ToStatus(api_->memory->synchronize(member->device()), "close"));
    }
    return Status::Ok();
  });
  {
    std::lock_guard lock(watch_mutex_);
    stopping_ = true;
  }
  watch_wake_.notify_all();
  if (watch_.joinable()) watch_.join();
  if (drained.ok()) {  // of the last kernels
    LatchDeviceFailures(/*may_wait=*/false);
    for (const auto& member : members_) ReadStamps(*member);
  }
  if (network_ != nullptr) network_->Stop();
  if (monitor_ != nullptr) monitor_->Stop();
  if (!drained.ok()) {
    // A device that cannot be waited for may still use this memory: keep it mapped for ever.
    LogError("group " + options().name + ": " + drained.message() + "; " +
             std::to_string(HeapBytes()) + " bytes stay allocated");
    for (const auto& member : members_) {
      member->control = {};
      member->controls.clear();
    }
    if (network_ != nullptr) network_->Leak();
    return;
  }
  const Status freed = OnOwnThread([&]() -> Status {
    const gpu::DeviceMemoryApi& memory = *api_->memory;
    // First all of them: kernels of one rank reach the memory of the others. From then on programs
    // that XLA captured touch the kept bytes of the heaps alone. (Those of elastic groups are not
    // captured, and each agreement ends a session.)
    if (network_ != nullptr) JAX_EP_RETURN_IF_ERROR(network_->EndCopies());
    bool has_run = false;
    for (const auto& member : members_) {
      JAX_EP_RETURN_IF_ERROR(ToStatus(memory.use_device(member->device()), "close"));
      gpu::RankHandle* handle = std::exchange(member->handle, nullptr);
      if (handle == nullptr) continue;
      has_run = true;
      JAX_EP_RETURN_IF_ERROR(ToStatus(api_->destroy(handle), "close"));
    }
    // NICs let go of the stages before their memory goes.
    const Status released = network_ == nullptr ? Status::Ok() : network_->Release();
    for (const auto& member : members_) {
      JAX_EP_RETURN_IF_ERROR(ToStatus(memory.use_device(member->device()), "close"));
      for (const gpu::DeviceRange& range : member->imported) {
        JAX_EP_RETURN_IF_ERROR(ToStatus(memory.release(range), "unmap"));
      }
      member->imported.clear();
      const bool is_captured = has_run && !options().is_elastic();
      const auto free_heap = is_captured ? memory.retire : memory.release;
      JAX_EP_RETURN_IF_ERROR(ToStatus(free_heap(member->heap), "free"));
      JAX_EP_RETURN_IF_ERROR(ToStatus(memory.release_pinned(member->status), "free"));
      if (member->stamps != nullptr) {
        JAX_EP_RETURN_IF_ERROR(ToStatus(memory.release_pinned(member->stamps), "free"));
      }
      member->heap = {};
      member->status = nullptr;
    }
    return released;
  });
  if (!freed.ok()) {
    LogError("group " + options().name + ": " + freed.message());
    if (network_ != nullptr) network_->Leak();
  }
  members_.clear();
  monitor_.reset();
  network_.reset();
  tracer_.reset();
}

}  // namespace jax_ep
