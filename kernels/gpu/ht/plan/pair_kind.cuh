// What becomes of a pair (token, k), by its expert id.
#pragma once

#include <cstdint>

#include "kernels/gpu/device/vendor.h"

namespace jax_ep::gpu {

// Absent: no expert. Invalid: of an expert that there is not. Duplicate: in expert_batched, of one
// that a lower pair of the token has too.
enum class PairKind : uint8_t { kPlaced, kAbsent, kDuplicate, kInvalid };

// is_duplicate(): asked for valid ids only.
template <typename IsDuplicate>
__device__ inline PairKind KindOfPair(int32_t expert, uint32_t num_experts,
                                      IsDuplicate&& is_duplicate) {
  if (expert < 0) return PairKind::kAbsent;
  if (static_cast<uint32_t>(expert) >= num_experts) return PairKind::kInvalid;
  return is_duplicate() ? PairKind::kDuplicate : PairKind::kPlaced;
}

}  // namespace jax_ep::gpu
