// A program that was lowered without its devices may run on any order of them: rows would go to
// other ranks than it means. Where it stands is a word of device memory, so a kernel must look.
#include "kernels/gpu/launch.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/protocol/control.cuh"

namespace jax_ep::gpu {
namespace {

// One thread, before the kernels of a call; they find that the rank has failed.
__global__ void CheckPosition(const __grid_constant__ DeviceRank device, const int32_t* position,
                              int32_t expected) {
  if (HasFailed(device) || *position == expected) return;
  Fail(device, FailureKind::kWrongPosition, Operation::kPlan, device.rank,
       static_cast<uint64_t>(expected), static_cast<uint64_t>(*position));
}

}  // namespace

const char* PreparePositionKernel(const RankHandle&) { return PrepareKernel(&CheckPosition, 0); }

const char* LaunchCheckPosition(RankHandle& rank, const int32_t* position, int32_t expected,
                                cudaStream_t stream) {
  CheckPosition<<<1, 1, 0, stream>>>(rank.device, position, expected);
  return LaunchResult("CheckPosition");
}

}  // namespace jax_ep::gpu
