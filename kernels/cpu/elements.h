// Element types of rows, and what lets arithmetic on them vectorise: for the files of this folder
// that compute.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

// One clone of each function per instruction set, chosen when the library is loaded. Sanitizers
// cannot run the resolvers, which come before their own start.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define JAX_EP_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define JAX_EP_CLONES
#endif

namespace jax_ep {

// `a` or `b`, without what a compiler might turn back into a branch: that would not vectorise.
template <typename Bits>
__attribute__((always_inline)) inline Bits Select(bool condition, Bits a, Bits b) {
  const auto mask = static_cast<Bits>(Bits{0} - static_cast<Bits>(condition));
  return static_cast<Bits>(b ^ ((a ^ b) & mask));
}

// One element type: storage, and exact or rounding conversions that compile to branch-free code.
struct F32 {
  using Storage = float;
  using Bits = uint32_t;
  static constexpr Bits kInfinity = 0x7f800000u;
  static inline float Load(Storage value) { return value; }
  static inline Storage Store(float value) { return value; }
};

struct Bf16 {
  using Storage = uint16_t;
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7f80;
  static inline float Load(Storage value) {
    return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
  }
  static inline Storage Store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    // Round to nearest even: add half of the last kept place, minus one if that place is even.
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<Storage>(Select(is_nan, quiet_nan, rounded));
  }
};

struct F16 {
  using Storage = uint16_t;
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7c00;
  static inline float Load(Storage value) {
    const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
    const uint32_t magnitude = value & 0x7fffu;
    // Subnormal: an integer multiple of 2^-24. Exact, and safe where f32 subnormals are flushed.
    const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
    const uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
    const uint32_t special = (magnitude << 13) | 0x7f800000u;  // infinity, NaN
    const uint32_t finite = Select(magnitude < 0x400u, std::bit_cast<uint32_t>(subnormal), normal);
    return std::bit_cast<float>(sign | Select(magnitude >= 0x7c00u, special, finite));
  }
  static inline Storage Store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Below 2^-14: adding 0.5 puts the result's last place at 2^-24, so the FPU rounds it.
    const uint32_t half_bits = std::bit_cast<uint32_t>(0.5f);
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - half_bits;
    const uint32_t normal =
        (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t finite = Select(magnitude < (113u << 23), subnormal, normal);
    const uint32_t special = Select(magnitude > 0x7f800000u, 0x7e00u, 0x7c00u);  // NaN, infinity
    return static_cast<Storage>(sign | Select(magnitude >= ((127u + 16u) << 23), special, finite));
  }
};

// Forced into the cloned entry points, where they take on their instruction set.
template <typename Elem>
__attribute__((always_inline)) inline const typename Elem::Storage* Typed(const std::byte* row) {
  return reinterpret_cast<const typename Elem::Storage*>(row);
}
template <typename Elem>
__attribute__((always_inline)) inline typename Elem::Storage* Typed(std::byte* row) {
  return reinterpret_cast<typename Elem::Storage*>(row);
}

}  // namespace jax_ep
