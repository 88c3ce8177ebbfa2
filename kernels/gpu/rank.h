// The life of a rank on its device: what api.h says of create, destroy and what is asked in
// between.
#pragma once

#include "kernels/gpu/api.h"

namespace jax_ep::gpu {

const char* CreateRank(const RankConfig* config, RankHandle** out);
const char* DestroyRank(RankHandle* handle);

const char* ReadCounters(RankHandle* rank, RankCountersSnapshot* out);
const char* ReadPairsPerExpert(RankHandle* rank, uint64_t* out);
const char* ReadWaits(RankHandle* rank, uint64_t* out);
const char* ReadDeviceClock(RankHandle* rank, uint64_t (*host_clock)(), uint64_t* device_ns,
                            uint64_t* host_ns);
uint64_t StagedLaunches(const RankHandle* rank);
bool UsesBulkCopies(const RankHandle* rank);

}  // namespace jax_ep::gpu
