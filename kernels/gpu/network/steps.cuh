// Steps: the slices of all HT calls between nodes, counted on. The ranks of a node tell each other
// how far they are, with values that only grow.
#pragma once

#include "kernels/gpu/network/commands.cuh"
#include "kernels/gpu/network/token_slices.h"

namespace jax_ep::gpu {

// Of a slice of the running call: alike on all ranks.
__device__ inline uint64_t StepOf(const DeviceRank& device, const TokenSlice& slice) {
  const NetState* state = NetStateOf(device);
  return state->row_slices + state->sum_slices + slice.number;
}

// In filled_flags: this rank has stored its partials of the slice. In left_flags: it is through
// with the round that the slice ends, whose places are free.
__device__ inline uint64_t StepFlag(const DeviceRank& device, Operation operation,
                                    const TokenSlice& slice) {
  return FlagValue(StepOf(device, slice) + 1, operation, device.program);
}
// In left_flags: the places of the round that `slice` begins are free.
__device__ inline uint64_t FreeFlag(const DeviceRank& device, Operation operation,
                                    const TokenSlice& slice) {
  const uint64_t before = StepOf(device, slice) - slice.number;
  return FlagValue(before + slice.num_left(), operation, device.program);
}

}  // namespace jax_ep::gpu
