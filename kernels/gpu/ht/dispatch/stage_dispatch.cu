// Halves of an HT dispatch. start copies rows and weights to the stage of a slot set, and nothing
// else: peers learn of it in done, which is a dispatch that reads that stage in place
// (enter_operation.cu). done ends with a dispatch's tail flags, so when it has ended every rank has
// read the set, and no other word is needed before it is used again.
#include <algorithm>

#include "kernels/gpu/device/stage_copy.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/protocol/slot_sets.cuh"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kThreads = 512;
constexpr SetKind kKind = SetKind::kDispatch;

struct StartParams {
  DeviceRank device;
  const std::byte* x;    // null when absent
  const float* weights;  // null when absent
  uint64_t x_bytes;
  uint64_t weights_bytes;
  int32_t* epoch;
};

__global__ void __launch_bounds__(kThreads)
    StageDispatch(const __grid_constant__ StartParams params) {
  __shared__ CallSlot slot;
  __shared__ uint32_t shared_flag;
  const DeviceRank& device = params.device;
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) TakeBusyWord(device, Operation::kDispatchStart);
    slot = FindFreeSet(device, kKind, Operation::kDispatchStart);
  }
  SyncBlock();
  if (slot.is_ok != 0 && !HasFailed(device)) {
    auto* stage = OwnHeapAt<std::byte>(device, device.layout.dispatch_stage.At(slot.set));
    if (params.x != nullptr) GridCopyBytes(stage, params.x, params.x_bytes);
    if (params.weights != nullptr) {
      GridCopyBytes(stage + device.layout.dispatch_stage_weights,
                    reinterpret_cast<const std::byte*>(params.weights), params.weights_bytes);
    }
  }
  if (!LastToArrive(device, &shared_flag) || threadIdx.x != 0) return;
  *params.epoch = EpochOf(slot.started);
  ControlOf(device)->bytes_staged += params.x_bytes + params.weights_bytes;
  UpdateSet(device, kKind, CallPart::kStart, slot, slot.started);
  EndOperation(device, slot.started);
}

}  // namespace

const char* PrepareDispatchStartKernels(const RankHandle&) {
  return PrepareKernel(&StageDispatch, 0);
}

const char* LaunchDispatchStart(RankHandle& rank, const DispatchParams& call, int32_t* epoch,
                                cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  const uint64_t num_tokens = static_cast<uint64_t>(call.num_tokens);
  StartParams params{.device = rank.device,
                     .x = call.x,
                     .weights = DataOrNull(call.weights),
                     .x_bytes = 0,
                     .weights_bytes = call.weights.size_bytes(),
                     .epoch = epoch};
  if (call.x != nullptr) params.x_bytes = num_tokens * shape.hidden * ElemBytes(shape.elem_type);
  const uint32_t blocks = BlocksForCopy(params.x_bytes + params.weights_bytes, rank.max_blocks);
  StageDispatch<<<blocks, kThreads, 0, stream>>>(params);
  return LaunchResult("StageDispatch");
}

}  // namespace jax_ep::gpu
