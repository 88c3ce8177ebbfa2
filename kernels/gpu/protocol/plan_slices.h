// How the pairs of a rank are cut into slices for a plan with one exchange (ht/plan/plan.cu), from
// the call's shape alone, as all ranks must cut alike.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/layout.h"

namespace jax_ep::gpu {

// Slices of a rank, and of all ranks, at most.
inline constexpr uint32_t kMaxPlanSlices = 32;
inline constexpr uint32_t kMaxGroupSlices = 256;

constexpr uint32_t MostPlanSlices(uint32_t num_ranks) {
  return std::min(kMaxPlanSlices, kMaxGroupSlices / num_ranks);
}

struct PlanSlices {
  uint32_t count = 0;      // of a rank; 0: such a plan takes more than one exchange
  uint32_t num_pairs = 0;  // of a slice, the last ones' may be fewer
};

// Every rank reads the pairs of all ranks, which costs little while these are few. Ids and numbers
// within a slice have 16 bits each.
constexpr PlanSlices SlicesOf(const GroupShape& shape, uint64_t num_pairs) {
  constexpr uint32_t kMostRanks = 16;
  constexpr uint64_t kWantedPairs = 1024;      // of a slice
  constexpr uint64_t kSharedBytes = 60 << 10;  // that a block may use: all GPUs have 64 KiB
  constexpr uint64_t kTablesBytes = 4 * sizeof(int32_t);  // of an expert, beside the counts
  constexpr uint64_t kBits16 = 1u << 16;
  if (shape.num_nodes() > 1 || shape.num_ranks > kMostRanks) return {};
  const uint64_t tables_bytes = shape.num_experts * kTablesBytes;
  if (shape.num_experts >= kBits16 || tables_bytes >= kSharedBytes) return {};
  const uint64_t slice_bytes = AlignUp(shape.num_experts * sizeof(uint16_t), kWireUnitBytes);
  const uint64_t that_fit = (kSharedBytes - tables_bytes) / slice_bytes / shape.num_ranks;
  const uint64_t most = std::min<uint64_t>(MostPlanSlices(shape.num_ranks), that_fit);
  if (most == 0) return {};
  const uint64_t wanted = std::max<uint64_t>((num_pairs + kWantedPairs - 1) / kWantedPairs, 1);
  const uint64_t count = std::min(most, wanted);
  const uint64_t pairs = std::max<uint64_t>((num_pairs + count - 1) / count, 1);
  if (pairs >= kBits16) return {};
  return {.count = static_cast<uint32_t>(count), .num_pairs = static_cast<uint32_t>(pairs)};
}

}  // namespace jax_ep::gpu
