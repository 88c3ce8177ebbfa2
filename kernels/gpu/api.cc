// The table of functions behind api.h.
#include "kernels/gpu/api.h"

#include "kernels/gpu/calls.h"
#include "kernels/gpu/memory/device_memory.h"
#include "kernels/gpu/network/stage_layout.h"
#include "kernels/gpu/protocol/heap_layout.h"
#include "kernels/gpu/rank.h"

namespace jax_ep::gpu {
namespace {

uint64_t HeapBytes(const GroupShape* shape) { return GpuHeapLayout::Make(*shape).total_bytes; }
uint64_t KeptBytes(const GroupShape* shape) { return GpuHeapLayout::Make(*shape).kept_bytes; }

uint64_t StageBytes(const GroupShape* shape) { return NetLayout::Make(*shape).total_bytes; }
uint64_t SignalBytes(const GroupShape* shape) {
  return shape->num_nodes() == 1 ? 0 : NumSignals(shape->num_ranks) * sizeof(uint64_t);
}
uint64_t SignalOffset(const GroupShape* shape, Channel channel, uint32_t source) {
  return SignalIndex(shape->num_ranks, channel, source) * sizeof(uint64_t);
}

}  // namespace
}  // namespace jax_ep::gpu

extern "C" __attribute__((visibility("default"))) const jax_ep::gpu::GpuApi* jax_ep_gpu_api() {
  using namespace jax_ep::gpu;
  static const GpuApi api = {
      .abi_version = kAbiVersion,
      .heap_bytes = &HeapBytes,
      .kept_bytes = &KeptBytes,
      .stage_bytes = &StageBytes,
      .signal_bytes = &SignalBytes,
      .signal_offset = &SignalOffset,
      .create = &CreateRank,
      .destroy = &DestroyRank,
      .check_position = &RunCheckPosition,
      .plan = &RunPlan,
      .dispatch = &RunDispatch,
      .ll_dispatch = &RunLlDispatch,
      .combine = &RunCombine,
      .dispatch_start = &RunDispatchStart,
      .dispatch_done = &RunDispatchDone,
      .ll_dispatch_start = &RunLlDispatchStart,
      .ll_dispatch_done = &RunLlDispatchDone,
      .combine_start = &RunCombineStart,
      .combine_done = &RunCombineDone,
      .counters = &ReadCounters,
      .pairs_per_expert = &ReadPairsPerExpert,
      .wait_ns = &ReadWaits,
      .device_clock = &ReadDeviceClock,
      .staged_launches = &StagedLaunches,
      .uses_bulk_copies = &UsesBulkCopies,
      .memory = GetDeviceMemoryApi(),
  };
  return &api;
}
