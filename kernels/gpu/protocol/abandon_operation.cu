// The end of an operation that the host could not launch whole: some of its kernels run, the one
// that would end it never will.
#include "kernels/gpu/launch.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/protocol/control.cuh"

namespace jax_ep::gpu {
namespace {

// One thread. Behind what was launched of the operation, on its stream. The rank fails and its
// mates learn of it now, not after timeout_s, and the next call finds no operation that seems to
// run.
__global__ void AbandonOperation(const __grid_constant__ DeviceRank device,
                                 const __grid_constant__ Operation operation) {
  Fail(device, FailureKind::kNotLaunched, operation, device.rank, 0, 0);
  ControlOf(device)->busy = 0;
}

}  // namespace

const char* PrepareAbandonKernel(const RankHandle&) { return PrepareKernel(&AbandonOperation, 0); }

const char* LaunchAbandon(RankHandle& rank, Operation operation, cudaStream_t stream) {
  AbandonOperation<<<1, 1, 0, stream>>>(rank.device, operation);
  return LaunchResult("AbandonOperation");
}

}  // namespace jax_ep::gpu
