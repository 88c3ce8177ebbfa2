// Rows of elements as units of FP8 records: quantised as they are read (docs/semantics.md).
#pragma once

#include "kernels/gpu/device/record_units.cuh"

namespace jax_ep::gpu {

// The larger halves of two words.
__device__ inline uint32_t LargerHalves(uint32_t a, uint32_t b) {
#if JAX_EP_HIP
  return max(a & 0xffff0000u, b & 0xffff0000u) | max(a & 0xffffu, b & 0xffffu);
#else
  return __vmaxu2(a, b);
#endif
}

// A row of elements in memory, a source (record_units.cuh). kCount units of a lane are on their way
// together, and are quantised side by side: alone each would wait for its own results all the time.
template <typename Elem, uint32_t kUnits = sizeof(typename Elem::Storage) == 4 ? 2 : 4>
class ElementUnits {
 public:
  static constexpr uint32_t kCount = kUnits;

  __device__ explicit ElementUnits(const RecordFormat& format) : format_(format) {}
  __device__ ElementUnits(const RecordFormat& format, const std::byte* row) : format_(format) {
    SetRow(row);
  }
  __device__ void SetRow(const std::byte* row) {
    row_ = row;
    is_aligned_ = reinterpret_cast<uintptr_t>(row) % sizeof(uint4) == 0;
  }

  // Units first + i * kWarpSize, those below `end`; zeroes beyond.
  __device__ void Load(uint32_t first, uint32_t end) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      const uint32_t unit = first + i * kWarpSize;
      const auto* from =
          reinterpret_cast<const uint4*>(row_) + static_cast<uint64_t>(unit) * kWords;
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w) {
        words_[i][w] = uint4{0, 0, 0, 0};
        if (unit < end && is_aligned_) words_[i][w] = from[w];
      }
    }
  }
  // All lanes of the warp.
  template <typename Sink>
  __device__ void Give(uint32_t first, uint32_t end, Sink&& sink) const {
    uint32_t amax[kCount];  // bits
    bool is_usual = is_aligned_;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      amax[i] = LargestMagnitude(words_[i]);
      is_usual &= amax[i] < kInfinityBits;
    }
    if (!AllLanes(is_usual)) {
      GiveOneByOne(first, end, sink);
      return;
    }
    for (uint32_t mask = format_.units_per_block / 2; mask > 0; mask /= 2) {
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) amax[i] = max(amax[i], FromLaneXor(amax[i], mask));
    }
    BlockScale scales[kCount];
    if (format_.is_ue8m0) {
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) scales[i] = Ue8m0ScaleOf(amax[i]);
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) scales[i] = F32ScaleOf(amax[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      float values[kUnitElems];
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w) {
        float part[kPerWord];
        Unpack<Elem>(words_[i][w], part);
#pragma unroll
        for (uint32_t e = 0; e < kPerWord; ++e) values[w * kPerWord + e] = part[e];
      }
      sink(first + i * kWarpSize, end, Quantized(values, scales[i]));
    }
  }

 private:
  static constexpr uint32_t kWords = kUnitElems * sizeof(typename Elem::Storage) / sizeof(uint4);
  static constexpr uint32_t kPerWord = kUnitElems / kWords;

  // Of a unit, as the bits of an f32: those of infinity or more if one is infinite or NaN.
  __device__ static uint32_t LargestMagnitude(const uint4 (&words)[kWords]) {
    constexpr bool kAreHalves = sizeof(typename Elem::Storage) == 2;
    constexpr uint32_t kMagnitude = kAreHalves ? 0x7fff7fffu : 0x7fffffffu;
    uint32_t largest[kWords];
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      largest[w] = Larger(Larger(words[w].x & kMagnitude, words[w].y & kMagnitude),
                          Larger(words[w].z & kMagnitude, words[w].w & kMagnitude));
    }
#pragma unroll
    for (uint32_t width = kWords / 2; width > 0; width /= 2) {
#pragma unroll
      for (uint32_t w = 0; w < width; ++w) largest[w] = Larger(largest[w], largest[w + width]);
    }
    if constexpr (kAreHalves) {
      const uint32_t half = max(largest[0] >> 16, largest[0] & 0xffffu);
      return __float_as_uint(Elem::Load(static_cast<uint16_t>(half)));
    } else {
      return largest[0];
    }
  }
  __device__ static uint32_t Larger(uint32_t a, uint32_t b) {
    if constexpr (sizeof(typename Elem::Storage) == 2) return LargerHalves(a, b);
    return max(a, b);
  }
  __device__ static Unit Quantized(float (&values)[kUnitElems], const BlockScale& scale) {
#pragma unroll
    for (uint32_t e = 0; e < kUnitElems; ++e) values[e] = Multiply(values[e], scale.inverse);
    return {{ToE4m3x4(values[0], values[1], values[2], values[3]),
             ToE4m3x4(values[4], values[5], values[6], values[7]),
             ToE4m3x4(values[8], values[9], values[10], values[11]),
             ToE4m3x4(values[12], values[13], values[14], values[15])},
            scale.word};
  }
  // The same as Give for rows at any address, with any elements. Little code: it is seldom needed.
  template <typename Sink>
  __device__ __forceinline__ void GiveOneByOne(uint32_t first, uint32_t end, Sink&& sink) const {
#pragma unroll 1
    for (uint32_t i = 0; i < kCount; ++i) {
      const uint32_t unit = first + i * kWarpSize;
      const auto* from = reinterpret_cast<const typename Elem::Storage*>(row_) +
                         static_cast<uint64_t>(unit) * kUnitElems;
      float values[kUnitElems];
      uint32_t amax = 0;
#pragma unroll
      for (uint32_t e = 0; e < kUnitElems; ++e) {
        values[e] = unit < end ? Elem::Load(from[e]) : 0.0f;
        const uint32_t magnitude = __float_as_uint(values[e]) & 0x7fffffffu;
        // Infinity is as NaN, which the conversion keeps.
        if (magnitude == kInfinityBits) values[e] = __uint_as_float(kQuietNanBits);
        if (magnitude < kInfinityBits) amax = max(amax, magnitude);
      }
      for (uint32_t mask = format_.units_per_block / 2; mask > 0; mask /= 2) {
        amax = max(amax, FromLaneXor(amax, mask));
      }
      const BlockScale scale = format_.is_ue8m0 ? Ue8m0ScaleOf(amax) : F32ScaleOf(amax);
      sink(unit, end, Quantized(values, scale));
    }
  }

  const RecordFormat& format_;
  const std::byte* row_ = nullptr;
  bool is_aligned_ = false;
  uint4 words_[kCount][kWords];
};

}  // namespace jax_ep::gpu
