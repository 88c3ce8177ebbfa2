// Epochs of halves travel through XLA as i32; the counters that they belong to are 64 bits wide.
#pragma once

#include <cstdint>

namespace jax_ep {

constexpr int32_t TruncateEpoch(uint64_t epoch) {
  return static_cast<int32_t>(static_cast<uint32_t>(epoch));
}

// The epoch nearest to `newest` that truncates to `low`.
constexpr uint64_t ExtendEpoch(int32_t low, uint64_t newest) {
  const auto difference =
      static_cast<int32_t>(static_cast<uint32_t>(low) - static_cast<uint32_t>(newest));
  return newest + static_cast<uint64_t>(static_cast<int64_t>(difference));
}

}  // namespace jax_ep
