#include "kernels/gpu/network/commands.cuh"
#include "tests/kernels_gpu/ring_kernels.h"

namespace jax_ep::testing {
namespace {

using namespace gpu;

struct PushParams {
  DeviceRank device;
  uint32_t batches;  // of one warp: 32 commands each
};

// Warp w pushes writes to node 1 + w % num_rings, each ring has its node.
__global__ void PushBatches(const __grid_constant__ PushParams params) {
  const DeviceRank& device = params.device;
  const uint32_t warp = blockIdx.x * (blockDim.x / kWarpSize) + WarpId();
  const uint32_t node = 1 + warp % device.network->num_rings;
  const Command command{.op = Op::kWrite,
                        .dst_rank = node,
                        .length_bytes = 4096,
                        .channel = Channel::kDispatch,
                        .epoch = 1};
  for (uint32_t i = 0; i < params.batches; ++i) {
    if (!WarpPush(device, Operation::kDispatch, node, true, command)) return;
  }
}

// One warp of rank 0: a SIGNAL to rank 1 and the wait for its flag there, again and again.
__global__ void SignalAndWait(const __grid_constant__ DeviceRank device, const uint64_t* flag,
                              uint64_t first_epoch, uint32_t count, uint64_t* times_ns) {
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t epoch = first_epoch + i;
    const uint64_t begin = ClockNs();
    WarpPush(device, Operation::kDispatch, 1, LaneId() == 0,
             {.op = Op::kSignal, .dst_rank = 1, .channel = Channel::kDispatch, .epoch = epoch});
    if (LaneId() == 0) {
      SpinOn(
          device, flag, 1, Operation::kDispatch, epoch, FailureKind::kTimeout,
          [&](uint64_t seen, uint64_t) { return seen >= epoch ? Seen::kThere : Seen::kTooEarly; });
      times_ns[i] = ClockNs() - begin;
    }
    SyncWarp();
  }
}

}  // namespace

void LaunchPushBatches(const DeviceRank& device, uint32_t batches, uint32_t num_warps) {
  PushBatches<<<num_warps, kWarpSize>>>({.device = device, .batches = batches});
}

void LaunchSignalAndWait(const DeviceRank& device, const uint64_t* flag, uint64_t first_epoch,
                         uint32_t count, uint64_t* times_ns) {
  SignalAndWait<<<1, kWarpSize>>>(device, flag, first_epoch, count, times_ns);
}

}  // namespace jax_ep::testing
