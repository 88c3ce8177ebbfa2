// Epochs of halves travel through XLA as i32: the lower 24 bits of a counter that is 64 bits wide,
// and above them those of the generation of the session that started the half. A start's epoch
// means nothing to a later session of the group (Group.agree).
#pragma once

#include <cstdint>

namespace jax_ep {

inline constexpr int kEpochBits = 24;

constexpr int32_t PackEpoch(uint64_t epoch, uint32_t generation) {
  constexpr uint32_t kMask = (uint32_t{1} << kEpochBits) - 1;
  return static_cast<int32_t>(generation << kEpochBits | (static_cast<uint32_t>(epoch) & kMask));
}

constexpr bool IsOfGeneration(int32_t packed, uint32_t generation) {
  return static_cast<uint32_t>(packed) >> kEpochBits == (generation & (UINT32_MAX >> kEpochBits));
}

// The epoch nearest to `newest` that packs to `packed`.
constexpr uint64_t ExtendEpoch(int32_t packed, uint64_t newest) {
  constexpr int kUnused = 32 - kEpochBits;
  const uint32_t difference = static_cast<uint32_t>(packed) - static_cast<uint32_t>(newest);
  const int32_t nearest = static_cast<int32_t>(difference << kUnused) >> kUnused;
  return newest + static_cast<uint64_t>(static_cast<int64_t>(nearest));
}

}  // namespace jax_ep
