// The clock that kernels stamp their operations with, for the host to compare with its own.
#include "kernels/gpu/device/memory_order.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/launch_state.h"

namespace jax_ep::gpu {
namespace {

__global__ void ReadClock(uint64_t* out) { StoreReleaseSys(out, ClockNs()); }

}  // namespace

const char* LaunchReadClock(uint64_t* out, cudaStream_t stream) {
  ReadClock<<<1, 1, 0, stream>>>(out);
  return LaunchResult("ReadClock");
}

}  // namespace jax_ep::gpu
