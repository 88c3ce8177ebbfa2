// How FP8 records are read and where their parts go (record_units.cuh). Plain data for host and
// device.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/gpu/device/vendor.h"
#include "kernels/layout.h"

namespace jax_ep::gpu {

inline constexpr uint32_t kUnitElems = 16;
inline constexpr uint32_t kMostUnitsPerBlock = 32;

struct RecordFormat {
  uint32_t num_units;        // of a row
  uint32_t units_per_block;  // a power of two
  uint32_t block_shift;      // its logarithm
  bool is_ue8m0;

  __host__ __device__ uint32_t num_blocks() const { return num_units >> block_shift; }
  __host__ __device__ uint32_t hidden() const { return num_units * kUnitElems; }
  __host__ __device__ uint32_t scale_bytes() const { return is_ue8m0 ? 1 : sizeof(float); }
};
inline RecordFormat FormatOf(uint64_t hidden, uint32_t block, Fp8Scale scale) {
  const uint32_t units_per_block = block / kUnitElems;
  return {.num_units = static_cast<uint32_t>(hidden / kUnitElems),
          .units_per_block = units_per_block,
          .block_shift = static_cast<uint32_t>(std::countr_zero(units_per_block)),
          .is_ue8m0 = scale == Fp8Scale::kUe8m0};
}
constexpr bool IsBlockOfUnits(uint32_t block) {
  return block % kUnitElems == 0 && std::has_single_bit(block / kUnitElems) &&
         block / kUnitElems <= kMostUnitsPerBlock;
}

// Where the scales of received rows go.
struct ScalesPlace {
  std::byte* scales;        // null: rows are dequantised
  uint32_t num_blocks;      // of a row
  uint64_t rows_in_column;  // 0: row by row; else rows of a matrix whose columns they are

  __device__ uint64_t IndexOf(uint64_t row, uint32_t block) const {
    if (rows_in_column == 0) return row * num_blocks + block;
    // Rows have 32 bits, and a division of those is far shorter.
    const auto column = static_cast<uint32_t>(rows_in_column);
    const uint32_t matrix = static_cast<uint32_t>(row) / column;
    const uint32_t in_column = static_cast<uint32_t>(row) % column;
    return (static_cast<uint64_t>(matrix) * num_blocks + block) * column + in_column;
  }
};

// Rows of the last axis but one of what a layout delivers.
constexpr uint64_t RowsOfMatrix(const GroupShape& shape, Layout layout, int64_t num_tokens,
                                uint64_t recv_rows) {
  switch (layout) {
    case Layout::kExpertMajor:
      break;
    case Layout::kExpertBatched:
      return shape.num_ranks * static_cast<uint64_t>(num_tokens);
    case Layout::kRankMajor:
      return static_cast<uint64_t>(num_tokens);
  }
  return recv_rows;
}

}  // namespace jax_ep::gpu
