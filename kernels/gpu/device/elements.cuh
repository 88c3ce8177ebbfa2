// Element types on the device: exact widening to f32, rounding to nearest even back, and words of
// several elements. Products and sums of rows are never contracted to fused multiply-adds, so that
// they are the CPU's bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/gpu/device/vendor.h"
#include "kernels/layout.h"

namespace jax_ep::gpu {

struct F32 {
  using Storage = float;
  static constexpr ElemType kType = ElemType::kF32;
  __device__ static float Load(Storage value) { return value; }
  __device__ static Storage Store(float value) { return value; }
};

struct Bf16 {
  using Storage = uint16_t;
  static constexpr ElemType kType = ElemType::kBf16;
  __device__ static float Load(Storage value) {
    return __uint_as_float(static_cast<uint32_t>(value) << 16);
  }
  __device__ static Storage Store(float value) {
#if JAX_EP_HIP
    const uint32_t bits = __float_as_uint(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<Storage>(is_nan ? (bits >> 16) | 0x40u : rounded);
#else
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#endif
  }
};

struct F16 {
  using Storage = uint16_t;
  static constexpr ElemType kType = ElemType::kF16;
#if JAX_EP_HIP
  __device__ static float Load(Storage value) {
    return static_cast<float>(__builtin_bit_cast(_Float16, value));
  }
  __device__ static Storage Store(float value) {
    return __builtin_bit_cast(Storage, static_cast<_Float16>(value));
  }
#else
  __device__ static float Load(Storage value) { return __half2float(__ushort_as_half(value)); }
  __device__ static Storage Store(float value) { return __half_as_ushort(__float2half_rn(value)); }
#endif
};

// Calls select.operator()<Elem>() with a device type, on the host.
template <typename Select>
auto WithElem(ElemType type, Select&& select) {
  switch (type) {
    case ElemType::kF32:
      return select.template operator()<F32>();
    case ElemType::kBf16:
      return select.template operator()<Bf16>();
    case ElemType::kF16:
      return select.template operator()<F16>();
  }
  return decltype(select.template operator()<F32>()) {};
}
// Calls select.operator()<Elem, Partial>() with the types of rows and of partial sums.
template <typename Select>
auto WithSumTypes(const GroupShape& shape, Select&& select) {
  return WithElem(shape.elem_type, [&]<typename Elem>() {
    return shape.f32_partials ? select.template operator()<Elem, F32>()
                              : select.template operator()<Elem, Elem>();
  });
}

// Dot products add this many interleaved lanes, then the lanes pairwise (docs/semantics.md).
inline constexpr uint32_t kDotLanes = 256;

// What one lane moves at once: 16 bytes, or one element where rows are not made of 16-byte words.
template <typename Elem, bool kIsVectorised>
struct WordOf {
  using Type = std::conditional_t<kIsVectorised, uint4, typename Elem::Storage>;
  static constexpr uint32_t kElems = sizeof(Type) / sizeof(typename Elem::Storage);
};

// The word by value: through a reference it would be read byte by byte.
template <typename Elem, typename Word, uint32_t kElems>
__device__ inline void Unpack(Word word, float (&values)[kElems]) {
  static_assert(sizeof(Word) == kElems * sizeof(typename Elem::Storage));
  if constexpr (std::is_same_v<Elem, Bf16> && kElems % 2 == 0) {
    // One instruction per element: the upper ones need no shift.
    uint32_t pairs[kElems / 2];
    __builtin_memcpy(pairs, &word, sizeof(word));
#pragma unroll
    for (uint32_t i = 0; i < kElems / 2; ++i) {
      values[2 * i] = __uint_as_float(pairs[i] << 16);
      values[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
    return;
  }
  typename Elem::Storage elems[kElems];
  __builtin_memcpy(elems, &word, sizeof(word));
#pragma unroll
  for (uint32_t i = 0; i < kElems; ++i) values[i] = Elem::Load(elems[i]);
}

template <typename Elem, typename Word, uint32_t kElems>
__device__ inline Word Pack(const float (&values)[kElems]) {
  static_assert(sizeof(Word) == kElems * sizeof(typename Elem::Storage));
  typename Elem::Storage elems[kElems];
#pragma unroll
  for (uint32_t i = 0; i < kElems; ++i) elems[i] = Elem::Store(values[i]);
  Word word;
  __builtin_memcpy(&word, elems, sizeof(word));
  return word;
}

// Consecutive elements of type Elem from and to memory, in 16-byte words where they fill them.
template <typename Elem, uint32_t kElems>
__device__ inline void LoadElems(const typename Elem::Storage* from, float (&values)[kElems]) {
  constexpr uint32_t kBytes = kElems * sizeof(typename Elem::Storage);
  if constexpr (kBytes % sizeof(uint4) == 0) {
    constexpr uint32_t kWords = kBytes / sizeof(uint4);
    constexpr uint32_t kPerWord = kElems / kWords;
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
      const uint4 word = reinterpret_cast<const uint4*>(from)[i];
      float part[kPerWord];
      Unpack<Elem>(word, part);
#pragma unroll
      for (uint32_t j = 0; j < kPerWord; ++j) values[i * kPerWord + j] = part[j];
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kElems; ++i) values[i] = Elem::Load(from[i]);
  }
}

template <typename Elem, uint32_t kElems>
__device__ inline void StoreElems(typename Elem::Storage* to, const float (&values)[kElems]) {
  constexpr uint32_t kBytes = kElems * sizeof(typename Elem::Storage);
  if constexpr (kBytes % sizeof(uint4) == 0) {
    constexpr uint32_t kWords = kBytes / sizeof(uint4);
    constexpr uint32_t kPerWord = kElems / kWords;
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
      float part[kPerWord];
#pragma unroll
      for (uint32_t j = 0; j < kPerWord; ++j) part[j] = values[i * kPerWord + j];
      reinterpret_cast<uint4*>(to)[i] = Pack<Elem, uint4>(part);
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kElems; ++i) to[i] = Elem::Store(values[i]);
  }
}

// As if they had been stored, and loaded again. In words: one conversion takes two elements there,
// and one at a time is much slower.
template <typename Elem, uint32_t kElems>
__device__ inline void RoundElems(float (&values)[kElems]) {
  if constexpr (sizeof(typename Elem::Storage) * kElems == sizeof(uint4)) {
    Unpack<Elem>(Pack<Elem, uint4>(values), values);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kElems; ++i) values[i] = Elem::Load(Elem::Store(values[i]));
  }
}

// Not contracted, unlike a * b + c.
#if JAX_EP_HIP
__device__ inline float Multiply(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}
__device__ inline float Add(float a, float b) {
#pragma clang fp contract(off)
  return a + b;
}
#else
__device__ inline float Multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float Add(float a, float b) { return __fadd_rn(a, b); }
#endif

}  // namespace jax_ep::gpu
