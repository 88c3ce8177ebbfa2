// In a group that goes on without some of its ranks, calls may not name these: what they would have
// to say is taken to be nothing (SenderTo in control.cuh). Nor may a call of an elastic group leave
// out others. Ids and plans are in device memory, so a kernel must look.
#include "kernels/gpu/launch.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/protocol/control.cuh"

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kThreads = 512;

struct CheckActiveParams {
  DeviceRank device;
  Operation operation;
  bool are_ids;  // of experts; else a plan's
  RankNames names[kRankNameArrays];
};

// The expert that a mask has left out there (kUnreachable), or one that there is not.
__device__ uint32_t ExpertMaskedOut(int32_t id) {
  return static_cast<uint32_t>(id) - static_cast<uint32_t>(kUnreachable);
}

// Before the kernels of a call; they find that the rank has failed.
__global__ void __launch_bounds__(kThreads)
    CheckActive(const __grid_constant__ CheckActiveParams params) {
  const DeviceRank& device = params.device;
  if (HasFailed(device)) return;  // else the heap may be gone
  for (const RankNames& names : params.names) {
    for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x; i < names.count;
         i += static_cast<uint64_t>(gridDim.x) * kThreads) {
      const int32_t value = names.values[i];
      const bool is_masked = value < 0;
      if (is_masked && !params.are_ids) continue;
      const uint64_t named = is_masked ? ExpertMaskedOut(value) : static_cast<uint32_t>(value);
      const uint64_t rank = named / names.per_rank;
      // Beyond the last rank: no rank at all, which is another matter.
      if (rank >= device.shape.num_ranks) continue;
      const auto owner = static_cast<uint32_t>(rank);
      if (IsActive(device, owner) != is_masked) continue;
      const Misfit misfit = is_masked        ? Misfit::kMaskOut
                            : params.are_ids ? Misfit::kExpert
                                             : Misfit::kPlan;
      Fail(device, FailureKind::kNotActive, params.operation, owner, static_cast<uint64_t>(misfit),
           named);
      return;
    }
  }
}

}  // namespace

const char* PrepareActiveKernel(const RankHandle&) { return PrepareKernel(&CheckActive, 0); }

const char* LaunchCheckActive(RankHandle& rank, Operation operation, bool are_ids,
                              std::initializer_list<RankNames> names, cudaStream_t stream) {
  CheckActiveParams params{
      .device = rank.device, .operation = operation, .are_ids = are_ids, .names = {}};
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
