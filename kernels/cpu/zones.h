// Where the rows of each local expert go in the expert_major layout, and who is dropped when they
// do not fit (docs/semantics.md "Token dropping"). Pure arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace jax_ep {

// Rows up to the next multiple of `align`.
constexpr int64_t AlignRows(int64_t rows, int64_t align) {
  return (rows + align - 1) / align * align;
}

// Sum of the zones if none may exceed `cap` rows.
constexpr int64_t CappedDemand(std::span<const int64_t> demand, int64_t align, int64_t cap) {
  int64_t sum = 0;
  for (const int64_t rows : demand) sum += std::min(AlignRows(rows, align), cap);
  return sum;
}

// zones[e] = rows of local expert e's zone, a multiple of `align`; their sum is at most
// `recv_rows`. Without shortage each expert gets its aligned demand. With shortage water is filled:
// all get the same largest cap that fits, and what is left goes, one block each, to the experts
// still short, in expert order. Expert e keeps its first min(demand[e], zones[e]) pairs.
constexpr void FillZones(std::span<const int64_t> demand, int64_t align, int64_t recv_rows,
                         std::span<int64_t> zones) {
  int64_t largest = 0;
  for (const int64_t rows : demand) largest = std::max(largest, AlignRows(rows, align));
  int64_t fits = 0;  // blocks per expert that fit
  int64_t beyond = largest / align + 1;
  while (beyond - fits > 1) {
    const int64_t middle = fits + (beyond - fits) / 2;
    (CappedDemand(demand, align, middle * align) <= recv_rows ? fits : beyond) = middle;
  }
  const int64_t cap = fits * align;
  int64_t left = recv_rows - CappedDemand(demand, align, cap);
  for (size_t e = 0; e < demand.size(); ++e) {
    const int64_t wanted = AlignRows(demand[e], align);
    zones[e] = std::min(wanted, cap);
    if (zones[e] < wanted && left >= align) {
      zones[e] += align;
      left -= align;
    }
  }
}

}  // namespace jax_ep
