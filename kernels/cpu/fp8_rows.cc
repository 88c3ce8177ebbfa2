#include "kernels/fp8_rows.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/cpu/elements.h"

namespace jax_ep {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kNan = 0x7fu;  // the only one of e4m3fn, but for its sign
constexpr float kLargest = 448;   // of e4m3fn
// Below, a block counts as zero: its scale and its inverse must be normal floats.
constexpr uint32_t kSmallestAmax = (127u - 100u) << 23;  // bits of 2^-100

// How many blocks are quantised together.
constexpr uint64_t kMostAtOnce = 16, kElemsAtOnce = 2048;

// To nearest, ties to even.
__attribute__((always_inline)) inline uint8_t ToE4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-6: adding 2^14 puts the sum's last place at 2^-9, so the FPU rounds it.
  constexpr float kShift = 0x1p14f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + kShift) -
                             std::bit_cast<uint32_t>(kShift);
  const uint32_t normal =
      (magnitude - ((127u - 7u) << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  const uint32_t finite = Select(magnitude < (121u << 23), subnormal, normal);
  return static_cast<uint8_t>(sign | Select(magnitude >= kInfinity, kNan, finite));
}

__attribute__((always_inline)) inline float FromE4m3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7fu;
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
  const uint32_t normal = (magnitude << 20) + ((127u - 7u) << 23);
  const uint32_t finite = Select(magnitude < 8u, std::bit_cast<uint32_t>(subnormal), normal);
  return std::bit_cast<float>(sign | Select(magnitude == kNan, 0x7fc00000u, finite));
}

// Bits of the largest magnitude of the finite elements. Storage is ordered as the floats are, so
// only the result is converted: narrow types fill more lanes, and f16 has no subnormals to mind.
template <typename Elem>
__attribute__((always_inline)) inline uint32_t AmaxBits(
    const typename Elem::Storage* __restrict elems, uint64_t count) {
  using Bits = typename Elem::Bits;
  constexpr auto kMagnitude = static_cast<Bits>(std::numeric_limits<Bits>::max() >> 1);
  Bits most = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<Bits>(std::bit_cast<Bits>(elems[i]) & kMagnitude);
    most = std::max(most, Select<Bits>(magnitude < Elem::kInfinity, magnitude, 0));
  }
  return std::bit_cast<uint32_t>(Elem::Load(std::bit_cast<typename Elem::Storage>(most)));
}

// Writes the scale of a block and returns its inverse.
inline float StoreScale(Fp8Scale kind, uint32_t amax_bits, std::byte* to) {
  const bool is_used = amax_bits >= kSmallestAmax;
  if (kind == Fp8Scale::kUe8m0) {
    // 448 = 1.75 * 2^8: a significand above 1.75 carries into the exponent.
    const uint32_t exponent = is_used ? ((amax_bits + 0x1fffffu) >> 23) - 8u : 127u;
    *to = static_cast<std::byte>(exponent);
    return std::bit_cast<float>((254u - exponent) << 23);
  }
  const float amax = std::bit_cast<float>(amax_bits);
  const float scale = is_used ? amax * (1.0f / kLargest) : 1.0f;
  std::memcpy(to, &scale, sizeof(scale));
  return is_used ? kLargest / amax : 1.0f;
}

inline float LoadScale(Fp8Scale kind, const std::byte* from) {
  if (kind == Fp8Scale::kUe8m0) {
    const auto biased = static_cast<uint32_t>(*from);
    return std::bit_cast<float>(biased == 0xffu ? 0x7fc00000u : biased << 23);
  }
  float scale;
  std::memcpy(&scale, from, sizeof(scale));
  return scale;
}

template <typename Elem>
__attribute__((always_inline)) inline void QuantizeBody(const Fp8Rows& format, uint64_t num_rows,
                                                        const std::byte* rows, std::byte* records) {
  // Copies: a byte that is stored might be one of `format`, for all the compiler knows.
  const uint64_t hidden = format.hidden, block = format.block, row_bytes = format.row_bytes();
  const Fp8Scale kind = format.scale;
  const uint64_t pitch = format.record_bytes(), scale_bytes = ScaleBytes(kind);
  const uint64_t num_blocks = format.num_blocks(), used = hidden + num_blocks * scale_bytes;
  // The scales of some blocks, then their values: a block's values wait long for its scale. No more
  // than stays in the nearest cache.
  const uint64_t at_once = std::clamp<uint64_t>(kElemsAtOnce / block, 1, kMostAtOnce);
  for (uint64_t row = 0; row < num_rows; ++row) {
    const auto* row_elems = Typed<Elem>(rows + row * row_bytes);
    std::byte* record = records + row * pitch;
    std::byte* scale = record + hidden;
    for (uint64_t first = 0; first < num_blocks; first += at_once) {
      const uint64_t count = std::min(at_once, num_blocks - first);
      float inverses[kMostAtOnce];
      for (uint64_t b = 0; b < count; ++b) {
        const uint32_t amax_bits = AmaxBits<Elem>(row_elems + (first + b) * block, block);
        inverses[b] = StoreScale(kind, amax_bits, scale);
        scale += scale_bytes;
      }
      for (uint64_t b = 0; b < count; ++b) {
        const uint64_t begin = (first + b) * block;
        const auto* __restrict elems = row_elems + begin;
        auto* __restrict values = reinterpret_cast<uint8_t*>(record + begin);
        const float inverse = inverses[b];
        for (uint64_t i = 0; i < block; ++i) {
          values[i] = ToE4m3(Elem::Load(elems[i]) * inverse);
        }
      }
    }
    std::memset(record + used, 0, pitch - used);
  }
}

template <typename Elem>
__attribute__((always_inline)) inline void DequantizeBody(const Fp8Rows& format, uint64_t num_rows,
                                                          const std::byte* records,
                                                          std::byte* rows) {
  const uint64_t hidden = format.hidden, block = format.block, row_bytes = format.row_bytes();
  const Fp8Scale kind = format.scale;
  const uint64_t pitch = format.record_bytes(), scale_bytes = ScaleBytes(kind);
  for (uint64_t row = 0; row < num_rows; ++row) {
    const std::byte* record = records + row * pitch;
    const std::byte* from = record + hidden;
    for (uint64_t begin = 0; begin < hidden; begin += block) {
      auto* __restrict elems = Typed<Elem>(rows + row * row_bytes) + begin;
      const auto* __restrict values = reinterpret_cast<const uint8_t*>(record + begin);
      const float scale = LoadScale(kind, from);
      from += scale_bytes;
      for (uint64_t i = 0; i < block; ++i) {
        elems[i] = Elem::Store(FromE4m3(values[i]) * scale);
      }
    }
  }
}

}  // namespace

JAX_EP_CLONES void QuantizeRows(const Fp8Rows& format, uint64_t num_rows, const std::byte* rows,
                                std::byte* records) {
  switch (format.elem_type) {
    case ElemType::kF32:
      return QuantizeBody<F32>(format, num_rows, rows, records);
    case ElemType::kBf16:
      return QuantizeBody<Bf16>(format, num_rows, rows, records);
    case ElemType::kF16:
      return QuantizeBody<F16>(format, num_rows, rows, records);
  }
}

JAX_EP_CLONES void DequantizeRows(const Fp8Rows& format, uint64_t num_rows,
                                  const std::byte* records, std::byte* rows) {
  switch (format.elem_type) {
    case ElemType::kF32:
      return DequantizeBody<F32>(format, num_rows, records, rows);
    case ElemType::kBf16:
      return DequantizeBody<Bf16>(format, num_rows, records, rows);
    case ElemType::kF16:
      return DequantizeBody<F16>(format, num_rows, records, rows);
  }
}

}  // namespace jax_ep
