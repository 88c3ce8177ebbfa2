// The kernels of bench_gpu_ring.
#pragma once

#include <cstdint>

#include "kernels/gpu/network/network.h"
#include "kernels/gpu/protocol/device_rank.h"

namespace jax_ep::testing {

// Each of `num_warps` warps pushes `batches` times 32 writes, all to one of num_rings nodes.
void LaunchPushBatches(const gpu::DeviceRank& device, uint32_t batches, uint32_t num_warps);

// Rank 0 signals to rank 1 and waits for `flag`, which counts those signals, `count` times.
void LaunchSignalAndWait(const gpu::DeviceRank& device, const uint64_t* flag, uint64_t first_epoch,
                         uint32_t count, uint64_t* times_ns);

}  // namespace jax_ep::testing
