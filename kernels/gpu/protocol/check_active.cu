// In a group that goes on without some of its ranks, calls may not name these: what they would have
// to say is taken to be nothing (SenderTo in control.cuh). Ids and plans are in device memory, so a
// kernel must look.
#include "kernels/gpu/launch.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/protocol/control.cuh"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kThreads = 512;

struct CheckActiveParams {
  DeviceRank device;
  Operation operation;
  uint32_t num_arrays;  // more than one: of a plan
  RankNames names[kRankNameArrays];
};

// Before the kernels of a call; they find that the rank has failed.
__global__ void __launch_bounds__(kThreads)
    CheckActive(const __grid_constant__ CheckActiveParams params) {
  const DeviceRank& device = params.device;
  if (HasFailed(device)) return;  // else the heap may be gone
  for (const RankNames& names : params.names) {
    for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x; i < names.count;
         i += static_cast<uint64_t>(gridDim.x) * kThreads) {
      const int32_t value = names.values[i];
      if (value < 0) continue;
      const auto rank = static_cast<uint32_t>(static_cast<uint64_t>(value) / names.per_rank);
      // Beyond the last rank: no rank at all, which is another matter.
      if (rank >= device.shape.num_ranks || IsActive(device, rank)) continue;
      Fail(device, FailureKind::kNotActive, params.operation, rank, params.num_arrays > 1 ? 1 : 0,
           static_cast<uint64_t>(value));
      return;
    }
  }
}

}  // namespace

const char* PrepareActiveKernel(const RankHandle&) { return PrepareKernel(&CheckActive, 0); }

const char* LaunchCheckActive(RankHandle& rank, Operation operation,
                              std::initializer_list<RankNames> names, cudaStream_t stream) {
  CheckActiveParams params{.device = rank.device,
                           .operation = operation,
                           .num_arrays = static_cast<uint32_t>(names.size()),
                           .names = {}};
  uint64_t count = 0;
  RankNames* to = params.names;
  for (const RankNames& array : names) {
    count += array.count;
    *to++ = array;
  }
  constexpr uint32_t kAtOnce = 4;  // of a thread
  CheckActive<<<BlocksFor(count, kAtOnce * kThreads, rank.max_blocks), kThreads, 0, stream>>>(
      params);
  return LaunchResult("CheckActive");
}

}  // namespace jax_ep::gpu
