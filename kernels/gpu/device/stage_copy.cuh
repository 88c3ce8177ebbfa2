// Blocks of a grid copy an array to its stage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gpu/device/vendor.h"

namespace jax_ep::gpu {

// The first `num_blocks` blocks.
__device__ inline void BlocksCopyBytes(uint32_t num_blocks, std::byte* to, const std::byte* from,
                                       uint64_t num_bytes) {
  const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const uint64_t num_threads = static_cast<uint64_t>(num_blocks) * blockDim.x;
  const auto ends = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
  const bool is_aligned = ends % sizeof(uint4) == 0;
  const uint64_t num_words = is_aligned ? num_bytes / sizeof(uint4) : 0;
  const auto* from_words = reinterpret_cast<const uint4*>(from);
  auto* to_words = reinterpret_cast<uint4*>(to);
  constexpr uint32_t kInFlight = 4;
  uint64_t i = thread;
  for (; i + (kInFlight - 1) * num_threads < num_words; i += kInFlight * num_threads) {
    uint4 words[kInFlight];
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j) words[j] = from_words[i + j * num_threads];
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j) to_words[i + j * num_threads] = words[j];
  }
  for (; i < num_words; i += num_threads) to_words[i] = from_words[i];
  for (uint64_t byte = num_words * sizeof(uint4) + thread; byte < num_bytes; byte += num_threads) {
    to[byte] = from[byte];
  }
}
__device__ inline void GridCopyBytes(std::byte* to, const std::byte* from, uint64_t num_bytes) {
  BlocksCopyBytes(gridDim.x, to, from, num_bytes);
}

}  // namespace jax_ep::gpu
