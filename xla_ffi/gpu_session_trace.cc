// The operations of a GpuSession's ranks in the trace: kernels stamp them, the watch reads the
// stamps while it looks for failures.
#include <new>

#include "xla_ffi/gpu_member.h"

namespace jax_ep {

Status GpuSession::AllocateStamps() {
  JAX_EP_ASSIGN_OR_RETURN(const Env env, Env::Read());
  JAX_EP_ASSIGN_OR_RETURN(tracer_, OpenTracer(options(), env));
  if (tracer_ == nullptr) return Status::Ok();
  for (const auto& member : members_) {
    void* memory = nullptr;
    const std::string who = "group " + options().name + ": the trace of its GPUs";
    JAX_EP_RETURN_IF_ERROR(ToStatus(api_->memory->use_device(member->device()), who));
    JAX_EP_RETURN_IF_ERROR(ToStatus(
        api_->memory->allocate_pinned(gpu::kStampSlots * sizeof(gpu::OperationStamp), &memory),
        who));
    member->stamps = new (memory) gpu::OperationStamp[gpu::kStampSlots]();
    member->trace = AddTrack(tracer_.get(), options(), member->id, TrackKind::kRank);
  }
  return Status::Ok();
}

Status GpuSession::CompareClocks() {
  if (tracer_ == nullptr) return Status::Ok();
  for (const auto& member : members_) {
    uint64_t device_ns = 0, host_ns = 0;
    JAX_EP_RETURN_IF_ERROR(
        ToStatus(api_->device_clock(member->handle, &MonotonicNs, &device_ns, &host_ns),
                 "group " + options().name));
    member->clock_shift = static_cast<int64_t>(host_ns - device_ns);
  }
  return Status::Ok();
}

void GpuSession::ReadStamps(Member& member) const {
  if (member.trace == nullptr) return;
  while (true) {
    const gpu::OperationStamp& stamp = member.stamps[member.next_stamp % gpu::kStampSlots];
    // Acquire: pairs with the kernel's release; the rest of the slot is there.
    const uint64_t epoch = stamp.epoch.load(std::memory_order_acquire);
    if (epoch < member.next_stamp) return;
    if (epoch > member.next_stamp) {  // the kernels were once around
      member.trace->NoteDropped(epoch - member.next_stamp);
      member.next_stamp = epoch;
      continue;
    }
    const auto of = [](const auto& word) { return word.load(std::memory_order_relaxed); };
    const uint64_t end_ns = of(stamp.end_ns);
    // The two clocks drift apart; this much is sure: what has been read has ended.
    const auto latest_shift = static_cast<int64_t>(MonotonicNs() - end_ns);
    if (latest_shift < member.clock_shift) member.clock_shift = latest_shift;
    const auto shift = static_cast<uint64_t>(member.clock_shift);
    const char* const name = NameOf(static_cast<gpu::Operation>(of(stamp.operation)));
    member.trace->Add({.begin_ns = of(stamp.begin_ns) + shift,
                       .end_ns = end_ns + shift,
                       .value = epoch,
                       .detail = of(stamp.site),
                       .kind = TraceKind::kCall,
                       .name = member.trace->NameIndex(name)});
    ++member.next_stamp;
  }
}

void GpuSession::TraceWait(Member& member) {
  if (member.trace == nullptr) return;
  const Activity& activity = member.control_block()->activity;
  const auto of = [](const auto& word) { return word.load(std::memory_order_relaxed); };
  member.trace->Add({.begin_ns = of(activity.since_ns),
                     .end_ns = member.shown_at_ns,
                     .peer = static_cast<uint16_t>(of(activity.awaited)),
                     .kind = TraceKind::kPhase,
                     .name = member.trace->NameIndex("wait")});
}

}  // namespace jax_ep
