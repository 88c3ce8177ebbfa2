// Rows as FP8 records, in units of 16 elements: what a lane has in hand is the unit's values, one
// word, and the scale of its block. A warp takes a range of units of a row from a source
//   ElementUnits   elements, quantised as they are read
//   RecordUnits    a record
// and gives each to a sink: into a record, or dequantised into a row. So no row has to be in memory
// in both forms. Blocks are 16 * 2^i elements, at most a unit of each lane of a warp.
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

// A row of elements in memory. kCount units of a lane are on their way together.
template <typename Elem>
class ElementUnits {
 public:
  static constexpr uint32_t kCount = sizeof(typename Elem::Storage) == 4 ? 2 : 4;

  __device__ ElementUnits(const RecordFormat& format, const std::byte* row)
      : format_(format), row_(row), is_aligned_(reinterpret_cast<uintptr_t>(row) % 16 == 0) {}

  // Units first + i * kWarpSize, those below `end`; zeroes beyond.
  __device__ void Load(uint32_t first, uint32_t end) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      const uint32_t unit = first + i * kWarpSize;
      const std::byte* from = row_ + static_cast<uint64_t>(unit) * kUnitBytes;
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w) {
        words_[i][w] = uint4{0, 0, 0, 0};
        if (unit < end) words_[i][w] = LoadWord(from + w * sizeof(uint4));
      }
    }
  }
  // All lanes of the warp.
  __device__ Unit Get(uint32_t i) const {
    float values[kUnitElems];
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      float part[kPerWord];
      Unpack<Elem>(words_[i][w], part);
#pragma unroll
      for (uint32_t e = 0; e < kPerWord; ++e) values[w * kPerWord + e] = part[e];
    }
    float amax = LargestOf(values);
    if (__float_as_uint(amax) >= kInfinityBits) {
      // As if they were NaN, which fmaxf passes over and the conversion keeps.
#pragma unroll
      for (uint32_t e = 0; e < kUnitElems; ++e) {
        const bool is_infinite = (__float_as_uint(values[e]) & 0x7fffffffu) == kInfinityBits;
        if (is_infinite) values[e] = __uint_as_float(kQuietNanBits);
      }
      amax = LargestOf(values);
    }
    for (uint32_t mask = format_.units_per_block / 2; mask > 0; mask /= 2) {
      amax = fmaxf(amax, FromLaneXor(amax, mask));
    }
    const BlockScale scale = ScaleOf(amax, format_.is_ue8m0);
#pragma unroll
    for (uint32_t e = 0; e < kUnitElems; ++e) values[e] = Multiply(values[e], scale.inverse);
    return {{ToE4m3x4(values[0], values[1], values[2], values[3]),
             ToE4m3x4(values[4], values[5], values[6], values[7]),
             ToE4m3x4(values[8], values[9], values[10], values[11]),
             ToE4m3x4(values[12], values[13], values[14], values[15])},
            scale.word};
  }

 private:
  static constexpr uint32_t kUnitBytes = kUnitElems * sizeof(typename Elem::Storage);
  static constexpr uint32_t kWords = kUnitBytes / sizeof(uint4);
  static constexpr uint32_t kPerWord = kUnitElems / kWords;

  __device__ static float LargestOf(const float (&values)[kUnitElems]) {
    float amax = 0.0f;
#pragma unroll
    for (uint32_t e = 0; e < kUnitElems; ++e) amax = fmaxf(amax, fabsf(values[e]));
    return amax;
  }
  __device__ uint4 LoadWord(const std::byte* from) const {
    if (is_aligned_) return *reinterpret_cast<const uint4*>(from);
    typename Elem::Storage elems[kPerWord];
#pragma unroll
    for (uint32_t e = 0; e < kPerWord; ++e) {
      elems[e] = reinterpret_cast<const typename Elem::Storage*>(from)[e];
    }
    uint4 word;
    __builtin_memcpy(&word, elems, sizeof(word));
    return word;
  }

  const RecordFormat& format_;
  const std::byte* row_;
  bool is_aligned_;
  uint4 words_[kCount][kWords];
};

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
  __device__ Unit Get(uint32_t i) const { return units_[i]; }

 private:
  const RecordFormat& format_;
  const std::byte* record_;
  Unit units_[kCount];
};

// One warp: sink(unit, in hand) for the units [begin, end) of a row, which are whole blocks.
template <typename Source, typename Sink>
__device__ inline void ForUnits(Source&& source, uint32_t begin, uint32_t end, Sink&& sink) {
  constexpr uint32_t kCount = std::remove_reference_t<Source>::kCount;
  for (uint32_t base = begin; base < end; base += kCount * kWarpSize) {
    const uint32_t first = base + LaneId();
    source.Load(first, end);
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      const Unit in_hand = source.Get(i);
      const uint32_t unit = first + i * kWarpSize;
      if (unit < end) sink(unit, in_hand);
    }
  }
}

// Sinks' parts. Of a record at a multiple of 16 bytes; what pads it is left alone.
__device__ inline void StoreInRecord(const RecordFormat& format, std::byte* record, uint32_t unit,
                                     const Unit& in_hand) {
  reinterpret_cast<uint4*>(record)[unit] = in_hand.values;
  if (LeadsBlock(format, unit)) {
    StoreScale(format, record + format.hidden(), unit >> format.block_shift, in_hand.scale);
  }
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
  __device__ void StoreInRow(std::byte* row, uint32_t unit) const {
    auto* to = reinterpret_cast<uint4*>(row) + static_cast<uint64_t>(unit) * kWords;
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) to[w] = words[w];
  }
};

}  // namespace jax_ep::gpu
