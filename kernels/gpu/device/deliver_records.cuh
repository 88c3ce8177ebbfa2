// What a received record becomes: a row of elements (DequantizedRows), or a row of values and a row
// of scales (SplitRows), at each of its places.
#pragma once

#include "kernels/gpu/device/record_units.cuh"

namespace jax_ep::gpu {

// One warp: the scales of a record at one place.
__device__ inline void StoreScales(const RecordFormat& format, const ScalesPlace& place,
                                   const std::byte* record, uint64_t row) {
#pragma unroll 1
  for (uint32_t block = LaneId(); block < format.num_blocks(); block += kWarpSize) {
    StoreScale(format, place.scales, place.IndexOf(row, block),
               LoadScale(format, record + format.hidden(), block));
  }
}
__device__ inline void ZeroScales(const RecordFormat& format, const ScalesPlace& place,
                                  uint64_t row) {
  if (place.scales == nullptr) return;
#pragma unroll 1
  for (uint32_t block = LaneId(); block < format.num_blocks(); block += kWarpSize) {
    StoreScale(format, place.scales, place.IndexOf(row, block), 0);
  }
}

// All lanes of a warp, as a sink is called: their units at all places, rows[0] to
// rows[num_rows - 1].
template <typename E>
struct DequantizedRows {
  using Elem = E;
  static constexpr bool kAreSplit = false;

  __device__ static void Store(const RecordFormat& format, std::byte* recv_x, const ScalesPlace&,
                               const int32_t* rows, uint32_t num_rows, uint32_t unit, uint32_t end,
                               const Unit& in_hand) {
    const uint64_t row_bytes = format.hidden() * sizeof(typename Elem::Storage);
    DequantizedUnit<Elem> elems(format, in_hand);
    elems.Share();
#pragma unroll 2  // kernels that are over soon wait for their code
    for (uint32_t copy = 0; copy < num_rows; ++copy) {
      elems.StoreInRowShared(recv_x + static_cast<uint64_t>(rows[copy]) * row_bytes, unit, end);
    }
  }
};
template <typename E>
struct SplitRows {
  using Elem = E;
  static constexpr bool kAreSplit = true;

  __device__ static void Store(const RecordFormat& format, std::byte* recv_x,
                               const ScalesPlace& place, const int32_t* rows, uint32_t num_rows,
                               uint32_t unit, uint32_t end, const Unit& in_hand) {
    if (unit >= end) return;
#pragma unroll 2  // kernels that are over soon wait for their code
    for (uint32_t copy = 0; copy < num_rows; ++copy) {
      const auto row = static_cast<uint64_t>(rows[copy]);
      reinterpret_cast<uint4*>(recv_x + row * format.hidden())[unit] = in_hand.values;
      if (!LeadsBlock(format, unit)) continue;
      StoreScale(format, place.scales, place.IndexOf(row, unit >> format.block_shift),
                 in_hand.scale);
    }
  }
};

// Calls select.operator()<Rows>() with what a call of that element type delivers, on the host.
template <typename Select>
auto WithRecordRows(ElemType type, bool are_split, Select&& select) {
  return WithElem(type, [&]<typename Elem>() {
    return are_split ? select.template operator()<SplitRows<Elem>>()
                     : select.template operator()<DequantizedRows<Elem>>();
  });
}

}  // namespace jax_ep::gpu
