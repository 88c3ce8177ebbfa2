// What the scheduler of a combine tells the reducers (combine_rows_in_bulk.cu).
#pragma once

#include <cstdint>

namespace jax_ep::gpu::team {

// What reducers do with a row, and after the last one of a sum, in this order. The number of
// 16-byte words of the row's type that the piece has is in the upper half.
enum SumOps : uint32_t {
  kHasRow = 1u << 0,      // weighted row of this rank, or a partial that is like one of weight 1
  kHasPartial = 1u << 1,  // partial of another type
  kIsZero = 1u << 2,      // the sum of no rows
  kRounds = 1u << 3,      // rounded as if it had left this rank
  kPushes = 1u << 4,      // waits while its neighbour in the tree is summed
  kIsResult = 1u << 5,    // stored as a result
  kIsPartial = 1u << 6,   // stored as a partial
  kEndsTask = 1u << 7,    // of partials
  kStops = 1u << 8,       // nothing follows
  kEndsSum = 1u << 9,     // any of the above but the first two
  kBeginsSum = 1u << 10,  // first row of its sum, or first partial of a part of the tree
  kMergesShift = 11,      // how many waiting neighbours are added
  kMergesMask = 7u,       // merges < 8
  kWordsShift = 16,
};

}  // namespace jax_ep::gpu::team
