// From expert ids to a plan: the arithmetic that HT and LL share. Prefix sums over the counts
// matrix, no atomics, no exchange.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/cpu/sync.h"
#include "kernels/launch.h"

namespace jax_ep {

// Pairs of one rank that cannot go anywhere.
struct LocalDrops {
  int32_t num_dropped = 0;  // invalid ids, and duplicates in expert_batched
  int32_t num_invalid = 0;  // ids >= num_experts
};

// Ints of `SortPairs`'s codes: each destination's segment starts at a multiple of 16 bytes.
constexpr uint64_t SortedCodesInts(uint64_t num_pairs, uint64_t num_ranks) {
  return num_pairs + num_ranks * (kWireUnitBytes / sizeof(int32_t));
}

// Ints of the sorted codes' segment for `owner`, given counts [E]: a multiple of 16 bytes.
uint64_t SegmentInts(const GroupShape& shape, const int32_t* counts, uint32_t owner);

// First index in the sorted codes of each destination's segment, and the end of the last: [N + 1].
std::vector<uint64_t> SegmentStarts(const GroupShape& shape, const int32_t* counts);

// Sorts the pairs of topk_idx [T * K] by (expert, token, k): counts [E], and codes t * K + k.
LocalDrops SortPairs(const GroupShape& shape, Layout layout, std::span<const int32_t> topk_idx,
                     int32_t* counts, int32_t* codes);

// Fails the group if the ids were not masked as the group has agreed (Rank::active, kUnreachable),
// or if the rank refuses invalid ids (Rank::refuses_invalid_ids) and there are any. To be called
// before the rank tells its peers anything: then none of them gets beyond this call, and into a
// wait for a rank whose program has ended (a collective of XLA's, for instance).
Status CheckIds(Operation& op, std::span<const int32_t> topk_idx);

// One rank's contribution to a plan.
struct SourceRouting {
  const int32_t* counts = nullptr;  // [E]
  const int32_t* codes = nullptr;   // its segment for this rank
  int32_t num_locally_dropped = 0;
};

// Fills params.out. `sources` is indexed by rank, `own_codes` is all of this rank's sorted codes.
// The counts' sums and the codes are in range (the caller has checked what came from outside).
void BuildPlan(const GroupShape& shape, uint32_t rank, const PlanParams& params,
               std::span<const SourceRouting> sources, const int32_t* own_codes);

// Adds a finished plan to the rank's counters.
void CountPlan(Rank& rank, const PlanParams& params, const LocalDrops& drops);

// Checks the spans of `params` against the group: empty, or what is wrong.
std::string CheckPlanParams(const GroupShape& shape, const PlanParams& params);

// Checks one source's counts [E] against T * K, then its codes for `rank`.
bool AreCountsInRange(const GroupShape& shape, int64_t num_pairs, const int32_t* counts);
bool AreCodesInRange(const GroupShape& shape, uint32_t rank, int64_t num_pairs,
                     const SourceRouting& source);

}  // namespace jax_ep
