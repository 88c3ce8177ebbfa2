// Numbers of float8_e4m3fn and scales of blocks, in registers: the arithmetic of docs/semantics.md,
// "FP8 rows", bit for bit. No division or product here may be approximated or contracted.
#pragma once

#include <cstdint>

#include "kernels/gpu/device/elements.cuh"

#if !JAX_EP_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define JAX_EP_CONVERTS_FP8 1
#else
#define JAX_EP_CONVERTS_FP8 0
#endif

namespace jax_ep::gpu {

inline constexpr uint32_t kInfinityBits = 0x7f800000u;
inline constexpr uint32_t kQuietNanBits = 0x7fc00000u;

#if !JAX_EP_CONVERTS_FP8
// To nearest, ties to even; |value| <= 448, or NaN.
__device__ inline uint32_t ToE4m3(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-6: adding 2^14 puts the sum's last place at 2^-9, so the addition rounds.
  constexpr float kShift = 16384.0f;
  const uint32_t subnormal =
      __float_as_uint(Add(__uint_as_float(magnitude), kShift)) - __float_as_uint(kShift);
  const uint32_t normal =
      (magnitude - ((127u - 7u) << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  const uint32_t finite = magnitude < (121u << 23) ? subnormal : normal;
  return ((bits >> 24) & 0x80u) | (magnitude >= kInfinityBits ? 0x7fu : finite);
}
__device__ inline float FromE4m3(uint32_t code) {
  const uint32_t sign = (code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7fu;
  const float subnormal = Multiply(static_cast<float>(magnitude), 0.001953125f);
  const uint32_t normal = (magnitude << 20) + ((127u - 7u) << 23);
  const uint32_t finite = magnitude < 8u ? __float_as_uint(subnormal) : normal;
  return __uint_as_float(sign | (magnitude == 0x7fu ? kQuietNanBits : finite));
}
#endif

// Four at a time, the first in the lowest byte.
__device__ inline uint32_t ToE4m3x4(float a, float b, float c, float d) {
#if JAX_EP_CONVERTS_FP8
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return static_cast<uint32_t>(high) << 16 | low;
#else
  return ToE4m3(a) | ToE4m3(b) << 8 | ToE4m3(c) << 16 | ToE4m3(d) << 24;
#endif
}
__device__ inline void FromE4m3x4(uint32_t codes, float (&values)[4]) {
#if JAX_EP_CONVERTS_FP8
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    uint32_t halves;  // exact: e4m3fn is a subset of binary16
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;"
        : "=r"(halves)
        : "h"(static_cast<uint16_t>(codes >> (16 * i))));
    values[2 * i] = F16::Load(static_cast<uint16_t>(halves));
    values[2 * i + 1] = F16::Load(static_cast<uint16_t>(halves >> 16));
  }
#else
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) values[i] = FromE4m3(codes >> (8 * i) & 0xffu);
#endif
}

// 448 / amax for amax in [2^-100, 2^128), rounded to nearest even.
#if JAX_EP_HIP
// HIP's `/` is that, unless fast math is asked for.
__device__ inline float LargestOver(uint32_t amax_bits) {
  return 448.0f / __uint_as_float(amax_bits);
}
#else
// Without the branches of a division, so that several run side by side. The quotient of the
// significand is right for each of the 2^23, even from a reciprocal two last places off (tried for
// all); the power of two is exact then: no quotient is subnormal.
__device__ inline float LargestOver(uint32_t amax_bits) {
  constexpr float kLargest = 448.0f;
  constexpr uint32_t kOne = 127u << 23;
  const float divisor = __uint_as_float((amax_bits & 0x7fffffu) | kOne);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
  inverse = __fmaf_rn(__fmaf_rn(-divisor, inverse, 1.0f), inverse, inverse);
  const float quotient = __fmul_rn(kLargest, inverse);
  const float rounded = __fmaf_rn(__fmaf_rn(-divisor, quotient, kLargest), inverse, quotient);
  return __uint_as_float(__float_as_uint(rounded) + kOne - (amax_bits & 0x7f800000u));
}
#endif

// The scale of a block: as a record has it (bits of an f32, or a biased exponent), and what its
// elements are multiplied with.
struct BlockScale {
  uint32_t word;
  float inverse;
};
// amax_bits: of the largest magnitude among the block's finite elements.
inline constexpr uint32_t kSmallestAmax = (127u - 100u) << 23;  // 2^-100; below that the scale is 1
__device__ inline BlockScale F32ScaleOf(uint32_t amax_bits) {
  const bool is_used = amax_bits >= kSmallestAmax;
  const float scale = Multiply(__uint_as_float(amax_bits), 1.0f / 448.0f);
  const float inverse = LargestOver(amax_bits);
  return {__float_as_uint(is_used ? scale : 1.0f), is_used ? inverse : 1.0f};
}
__device__ inline BlockScale Ue8m0ScaleOf(uint32_t amax_bits) {
  // 448 = 1.75 * 2^8: a significand above 1.75 carries into the exponent.
  const uint32_t exponent =
      amax_bits >= kSmallestAmax ? ((amax_bits + 0x1fffffu) >> 23) - 8u : 127u;
  return {exponent, __uint_as_float((254u - exponent) << 23)};
}
__device__ inline float ScaleValue(uint32_t word, bool is_ue8m0) {
  if (!is_ue8m0) return __uint_as_float(word);
  return __uint_as_float(word == 0xffu ? kQuietNanBits : word << 23);
}

}  // namespace jax_ep::gpu
