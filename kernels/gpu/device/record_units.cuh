// Rows as FP8 records, in units of 16 elements: what a lane has in hand is the unit's values, one
// word, and the scale of its block. A warp takes a range of units of a row from a source
//   ElementUnits   elements, quantised as they are read (element_units.cuh)
//   RecordUnits    a record
// and gives each to a sink: into a record, or dequantised into a row. So no row has to be in memory
// in both forms. Blocks are 16 * 2^i elements, at most a unit of each lane of a warp.
// A sink is called by all lanes of a warp, as sink(unit, end, in hand): units from `end` on are
// none.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gpu/device/fp8.cuh"
#include "kernels/gpu/device/record_format.h"
#include "kernels/gpu/device/warp.cuh"

namespace jax_ep::gpu {

// One unit in the hands of a lane.
struct Unit {
  uint4 values;
  uint32_t scale;  // as the record has it
};

__device__ inline void StoreScale(const RecordFormat& format, std::byte* scales, uint64_t index,
                                  uint32_t scale) {
  if (format.is_ue8m0) {
    reinterpret_cast<uint8_t*>(scales)[index] = static_cast<uint8_t>(scale);
  } else {
    reinterpret_cast<uint32_t*>(scales)[index] = scale;
  }
}
__device__ inline uint32_t LoadScale(const RecordFormat& format, const std::byte* scales,
                                     uint64_t index) {
  return format.is_ue8m0 ? reinterpret_cast<const uint8_t*>(scales)[index]
                         : reinterpret_cast<const uint32_t*>(scales)[index];
}
// Whether this lane's unit is the one that stands for its block.
__device__ inline bool LeadsBlock(const RecordFormat& format, uint32_t unit) {
  return (unit & (format.units_per_block - 1)) == 0;
}

// A record in memory of any kind, at a multiple of 16 bytes.
class RecordUnits {
 public:
  static constexpr uint32_t kCount = 4;

  __device__ RecordUnits(const RecordFormat& format, const std::byte* record)
      : format_(format), record_(record) {}

  __device__ void Load(uint32_t first, uint32_t end) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      const uint32_t unit = first + i * kWarpSize;
      if (unit >= end) continue;
      units_[i].values = reinterpret_cast<const uint4*>(record_)[unit];
      units_[i].scale = LoadScale(format_, record_ + format_.hidden(), unit >> format_.block_shift);
    }
  }
  template <typename Sink>
  __device__ void Give(uint32_t first, uint32_t end, Sink&& sink) const {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) sink(first + i * kWarpSize, end, units_[i]);
  }

 private:
  const RecordFormat& format_;
  const std::byte* record_;
  Unit units_[kCount] = {};
};

// One warp: the units [begin, end) of a row, which are whole blocks, to a sink. The first of them
// are on their way: source.Load(begin + LaneId(), end).
template <typename Source, typename Sink>
__device__ inline void GiveLoaded(Source& source, uint32_t begin, uint32_t end, Sink&& sink) {
  constexpr uint32_t kStep = Source::kCount * kWarpSize;
  for (uint32_t base = begin; base < end;) {
    source.Give(base + LaneId(), end, sink);
    base += kStep;
    if (base < end) source.Load(base + LaneId(), end);
  }
}
template <typename Source, typename Sink>
__device__ inline void ForUnits(Source&& source, uint32_t begin, uint32_t end, Sink&& sink) {
  source.Load(begin + LaneId(), end);
  GiveLoaded(source, begin, end, sink);
}

// Sinks' parts. One lane: a unit and, for its block, the scale, to where those of a record are.
__device__ inline void StoreUnit(const RecordFormat& format, std::byte* values, std::byte* scales,
                                 uint32_t unit, const Unit& in_hand) {
  reinterpret_cast<uint4*>(values)[unit] = in_hand.values;
  if (LeadsBlock(format, unit)) {
    StoreScale(format, scales, unit >> format.block_shift, in_hand.scale);
  }
}
// The record is at a multiple of 16 bytes; what pads it is left alone.
__device__ inline void StoreInRecord(const RecordFormat& format, std::byte* record, uint32_t unit,
                                     const Unit& in_hand) {
  StoreUnit(format, record, record + format.hidden(), unit, in_hand);
}

// A unit as elements again.
template <typename Elem>
struct DequantizedUnit {
  static constexpr uint32_t kWords = kUnitElems * sizeof(typename Elem::Storage) / sizeof(uint4);
  static constexpr uint32_t kPerWord = kUnitElems / kWords;
  uint4 words[kWords];

  __device__ DequantizedUnit(const RecordFormat& format, const Unit& in_hand) {
    const float scale = ScaleValue(in_hand.scale, format.is_ue8m0);
    const uint32_t codes[] = {in_hand.values.x, in_hand.values.y, in_hand.values.z,
                              in_hand.values.w};
    float values[kUnitElems];
#pragma unroll
    for (uint32_t q = 0; q < 4; ++q) {
      float part[4];
      FromE4m3x4(codes[q], part);
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) values[q * 4 + e] = Multiply(part[e], scale);
    }
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      float part[kPerWord];
#pragma unroll
      for (uint32_t e = 0; e < kPerWord; ++e) part[e] = values[w * kPerWord + e];
      words[w] = Pack<Elem, uint4>(part);
    }
  }
  // One lane.
  __device__ void StoreInRow(std::byte* row, uint32_t unit) const {
    auto* to = reinterpret_cast<uint4*>(row) + static_cast<uint64_t>(unit) * kWords;
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) to[w] = words[w];
  }
  // All lanes of the warp, before StoreInRowShared.
  __device__ void Share() {
    if constexpr (kShares) {
      const bool is_odd = LaneId() % 2 != 0;
      const uint4 given = is_odd ? words[0] : words[1];
      const uint4 received{FromLaneXor(given.x, 1), FromLaneXor(given.y, 1),
                           FromLaneXor(given.z, 1), FromLaneXor(given.w, 1)};
      words[0] = is_odd ? received : words[0];
      words[1] = is_odd ? words[1] : received;
    }
  }
  // One lane, to rows in global memory, which takes sectors of 32 bytes as quickly as halves of
  // them: neighbours have shared their units, and store parts of one at a time.
  __device__ void StoreInRowShared(std::byte* row, uint32_t unit, uint32_t end) const {
    if constexpr (kShares) {
      const uint32_t part = LaneId() % 2;
      const uint32_t first = unit - part;
      auto* to = reinterpret_cast<uint4*>(row) + static_cast<uint64_t>(first) * kWords + part;
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        if (first + i < end) to[i * kWords] = words[i];
      }
    } else if (unit < end) {
      StoreInRow(row, unit);
    }
  }

 private:
  static constexpr bool kShares = kWords == 2;
};

}  // namespace jax_ep::gpu
