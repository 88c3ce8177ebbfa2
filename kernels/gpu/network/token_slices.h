// The tokens of an HT call that cross nodes together. What has come of one slice is used while the
// next one is on its way. The number of slices follows from the number of tokens and from
// NetworkConfig.has_fast_wire, so all ranks cut alike.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/gpu/network/stage_layout.h"
#include "kernels/gpu/protocol/heap_layout.h"

namespace jax_ep::gpu {

// Of a fast wire: kernels of more slices take longer than they hide. Measured: docs/performance.md,
// Between nodes.
inline constexpr uint64_t kMostSlicesOfFastWire = 4;
static_assert(kMostSlicesOfFastWire <= kMostTokenSlices);

struct TokenSlice {
  uint64_t begin = 0;  // a multiple of kNetChunkTokens
  uint64_t end = 0;
  uint32_t number = 0;
  uint32_t count = 1;

  constexpr bool IsFirst() const { return number == 0; }
  constexpr bool IsLast() const { return number + 1 == count; }
  constexpr uint64_t num_tokens() const { return end - begin; }
  constexpr uint64_t num_chunks() const {
    return (num_tokens() + kNetChunkTokens - 1) / kNetChunkTokens;
  }
};

constexpr TokenSlice AllTokens(uint64_t num_tokens) { return {.begin = 0, .end = num_tokens}; }

// Calls of one node have one slice. Each slice ends with a signal and is used by kernels of its
// own.
constexpr uint32_t NumTokenSlices(uint64_t num_tokens, uint32_t num_nodes, bool has_fast_wire) {
  if (num_nodes == 1) return 1;
  const uint64_t num_chunks = AllTokens(num_tokens).num_chunks();
  const uint64_t most = has_fast_wire ? kMostSlicesOfFastWire : kMostTokenSlices;
  return static_cast<uint32_t>(std::clamp<uint64_t>(num_chunks, 1, most));
}
constexpr TokenSlice TokenSliceOf(uint64_t num_tokens, uint32_t number, uint32_t count) {
  const uint64_t num_chunks = AllTokens(num_tokens).num_chunks();
  const auto begin_of = [&](uint64_t slice) {
    return std::min(slice * num_chunks / count * kNetChunkTokens, num_tokens);
  };
  return {.begin = begin_of(number), .end = begin_of(number + 1), .number = number, .count = count};
}

}  // namespace jax_ep::gpu
