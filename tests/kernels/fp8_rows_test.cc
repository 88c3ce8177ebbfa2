// FP8 records against a slow reference: the nearest of all codes, in double.
#include "kernels/fp8_rows.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "kernels/cpu/rows.h"
#include "tests/kernels/oracle.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace jax_ep {
namespace {

using testing::DecodeElem;

double ValueOf(uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// The nearest of the finite codes; of two, the even one.
uint8_t Nearest(float value) {
  if (!std::isfinite(value)) return 0x7f;
  const double magnitude = std::abs(static_cast<double>(value));
  uint8_t best = 0;
  for (uint8_t code = 1; code < 0x7f; ++code) {
    const double distance = std::abs(ValueOf(code) - magnitude);
    const double least = std::abs(ValueOf(best) - magnitude);
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

struct Block {
  float scale = 1;
  float inverse = 1;
};

Block ScaleOf(Fp8Scale kind, const std::vector<float>& values) {
  double amax = 0;
  for (const float value : values) {
    if (std::isfinite(value)) amax = std::max(amax, std::abs(static_cast<double>(value)));
  }
  if (amax < 0x1p-100) return {};
  if (kind == Fp8Scale::kUe8m0) {
    int exponent = -128;
    while (std::ldexp(448, exponent) < amax) ++exponent;
    return {std::ldexp(1.0f, exponent), std::ldexp(1.0f, -exponent)};
  }
  // A quotient or product of two floats is rounded once: doubles have room for twice the bits.
  const double factor = static_cast<float>(1.0 / 448);
  return {static_cast<float>(amax * factor), static_cast<float>(448 / amax)};
}

struct Flushed {  // f32 subnormals, as on XLA's threads
#if defined(__SSE2__)
  explicit Flushed(bool is_on) : before(_mm_getcsr()) {
    if (is_on) _mm_setcsr(before | 0x8040);
  }
  ~Flushed() { _mm_setcsr(before); }
  unsigned before;
#else
  explicit Flushed(bool) {}
#endif
};

void Check(const Fp8Rows& format, const std::vector<std::byte>& rows) {
  const uint64_t num_rows = rows.size() / format.row_bytes(), pitch = format.record_bytes();
  const uint64_t elem_bytes = ElemBytes(format.elem_type);
  const uint64_t scale_bytes = format.scale == Fp8Scale::kF32 ? 4 : 1;
  for (const bool flushes : {false, true}) {
    std::vector<std::byte> records(num_rows * pitch, std::byte{0xa5});
    std::vector<std::byte> back(rows.size(), std::byte{0xa5});
    {
      const Flushed flushed(flushes);
      QuantizeRows(format, num_rows, rows.data(), records.data());
      DequantizeRows(format, num_rows, records.data(), back.data());
    }
    for (uint64_t row = 0; row < num_rows; ++row) {
      const std::byte* record = records.data() + row * pitch;
      for (uint64_t b = 0; b < format.num_blocks(); ++b) {
        std::vector<float> values;
        for (uint64_t i = 0; i < format.block; ++i) {
          const uint64_t at = row * format.hidden + b * format.block + i;
          values.push_back(
              static_cast<float>(DecodeElem(format.elem_type, rows.data() + at * elem_bytes)));
        }
        const Block expected = ScaleOf(format.scale, values);
        const std::byte* scale = record + format.hidden + b * scale_bytes;
        if (format.scale == Fp8Scale::kF32) {
          ASSERT_EQ(std::memcmp(scale, &expected.scale, 4), 0) << expected.scale;
        } else {
          ASSERT_EQ(static_cast<int>(*scale), std::ilogb(expected.scale) + 127);
        }
        for (uint64_t i = 0; i < format.block; ++i) {
          const auto code = static_cast<uint8_t>(record[b * format.block + i]);
          const uint8_t wanted = Nearest(values[i] * expected.inverse);
          const uint64_t at = row * format.hidden + b * format.block + i;
          const double got = DecodeElem(format.elem_type, back.data() + at * elem_bytes);
          if (std::isfinite(values[i])) {
            ASSERT_EQ(code, wanted) << values[i] << " by " << expected.inverse;
            const float product = static_cast<float>(ValueOf(code)) * expected.scale;
            std::byte stored[4];
            StoreRounded(format.elem_type, stored, &product, 1);  // rows_test checks it
            ASSERT_EQ(std::memcmp(stored, back.data() + at * elem_bytes, elem_bytes), 0) << product;
          } else {
            ASSERT_EQ(code & 0x7f, 0x7f);
            ASSERT_TRUE(std::isnan(got));
          }
        }
      }
      for (uint64_t i = format.hidden + format.num_blocks() * scale_bytes; i < pitch; ++i) {
        ASSERT_EQ(record[i], std::byte{0});
      }
    }
  }
}

constexpr Fp8Scale kScales[] = {Fp8Scale::kF32, Fp8Scale::kUe8m0};

constexpr ElemType kTypes[] = {ElemType::kF32, ElemType::kBf16, ElemType::kF16};

std::vector<std::byte> BytesOf(const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

TEST(Fp8Rows, EverySmallElementIsRoundedToTheNearest) {
  std::vector<std::byte> rows(65536 * 2);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto narrowed = static_cast<uint16_t>(bits);
    std::memcpy(rows.data() + 2 * bits, &narrowed, sizeof(narrowed));
  }
  for (const ElemType type : {ElemType::kBf16, ElemType::kF16}) {
    for (const Fp8Scale scale : kScales) {
      for (const uint64_t block : {64, 1024}) {
        Check({.elem_type = type, .hidden = 1024, .block = block, .scale = scale}, rows);
      }
    }
  }
}

TEST(Fp8Rows, RandomFloatsInBlocksOfAnySize) {
  std::mt19937 random(1);
  for (const uint64_t block : {1u, 7u, 48u, 128u, 201u}) {
    std::vector<float> values(block * 3 * 64);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < values.size(); ++i) {
      // Every fourth block has any bits: NaN, infinities, subnormals, both ends of the range.
      values[i] = i / block % 4 == 0 ? std::bit_cast<float>(static_cast<uint32_t>(random()))
                                     : std::ldexp(normal(random), static_cast<int>(i / block) - 90);
    }
    for (const Fp8Scale scale : kScales) {
      Check({.hidden = block * 3, .block = block, .scale = scale}, BytesOf(values));
    }
  }
}

TEST(Fp8Rows, AnyBitsInBlocksOfAnySize) {
  std::mt19937 random(2);
  for (const ElemType type : {ElemType::kBf16, ElemType::kF16}) {
    // Rows of one block, of a few, and of many.
    for (const auto& [block, num_blocks] : std::vector<std::pair<uint64_t, uint64_t>>{
             {1, 37}, {7, 19}, {48, 16}, {128, 17}, {201, 11}, {2049, 3}, {5000, 1}}) {
      std::vector<std::byte> rows(block * num_blocks * 3 * ElemBytes(type));
      // One exponent a block, so that every element counts; then any bits.
      for (uint64_t i = 0; i < rows.size() / 2; ++i) {
        auto bits = static_cast<uint16_t>(random());
        if (i / block % 4 != 0) {
          bits = static_cast<uint16_t>((bits & 0x83ffu) | ((i / block * 0x0400u) & 0x7c00u));
        }
        std::memcpy(rows.data() + 2 * i, &bits, sizeof(bits));
      }
      for (const Fp8Scale scale : kScales) {
        Check({.elem_type = type, .hidden = block * num_blocks, .block = block, .scale = scale},
              rows);
      }
    }
  }
}

// Records whose codes no element of theirs has made: each code under each scale, as a sender of
// another kind may write them.
TEST(Fp8Rows, EachCodeComesBackTimesItsScale) {
  constexpr uint64_t kBlock = 256;
  for (const ElemType type : kTypes) {
    for (const Fp8Scale kind : kScales) {
      // Both ends of what QuantizeRows makes in this type, and between.
      for (const float scale_value : {0x1p-108f, 0x1p-14f, 0x1p-3f, 1.0f, 0x1p7f, 0x1p30f, 0x1p119f,
                                      0x1.234568p-20f, 0x1.fffffep6f, 0x1.234568p100f}) {
        int exponent;
        if (kind == Fp8Scale::kUe8m0 && std::frexp(scale_value, &exponent) != 0.5f) continue;
        const Fp8Rows format{.elem_type = type, .hidden = kBlock, .block = kBlock, .scale = kind};
        std::vector<std::byte> record(format.record_bytes());
        for (uint64_t code = 0; code < kBlock; ++code) record[code] = std::byte(code);
        if (kind == Fp8Scale::kUe8m0) {
          record[kBlock] = std::byte(std::ilogb(scale_value) + 127);
        } else {
          std::memcpy(record.data() + kBlock, &scale_value, sizeof(scale_value));
        }
        for (const bool flushes : {false, true}) {
          std::vector<std::byte> row(format.row_bytes());
          {
            const Flushed flushed(flushes);
            DequantizeRows(format, 1, record.data(), row.data());
          }
          for (uint64_t code = 0; code < kBlock; ++code) {
            const uint64_t elem_bytes = ElemBytes(type);
            const std::byte* got = row.data() + code * elem_bytes;
            const double value = ValueOf(static_cast<uint8_t>(code));
            if (std::isnan(value)) {
              EXPECT_TRUE(std::isnan(DecodeElem(type, got)));
              continue;
            }
            const auto product = static_cast<float>(value * static_cast<double>(scale_value));
            std::byte wanted[4];
            StoreRounded(type, wanted, &product, 1);  // rows_test checks it
            EXPECT_EQ(std::memcmp(got, wanted, elem_bytes), 0) << code << " by " << scale_value;
          }
        }
      }
    }
  }
}

TEST(Fp8Rows, EdgesOfTheScale) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> values;
  const auto add_block = [&](float amax, float other) {
    values.insert(values.end(),
                  {other, -amax, 0.0f, -0.0f, amax / 3, amax * 0x1p-12f, other, amax});
  };
  for (const float amax : {0.0f, 0x1p-149f, 0x1p-126f, 0x1p-100f, 448.0f, 1.0f, 1.75f,
                           std::numeric_limits<float>::max()}) {
    for (const float other : {0.0f, infinity, -infinity, nan}) {
      add_block(amax, other);
      add_block(std::nextafterf(amax, 0.0f), other);
      add_block(std::nextafterf(amax, 3e38f), other);
    }
  }
  for (const Fp8Scale scale : kScales) {
    Check({.hidden = 8, .block = 8, .scale = scale}, BytesOf(values));
  }
}

TEST(Fp8Rows, BytesOfAPoisonedCallAreNan) {
  for (const Fp8Scale scale : kScales) {
    const Fp8Rows format{.hidden = 8, .block = 4, .scale = scale};
    std::vector<std::byte> record(format.record_bytes(), std::byte{0xff});
    std::vector<float> row(format.hidden);
    for (const std::byte value :
         {std::byte{0xff}, std::byte{0x38}}) {  // NaN; 1, whose scale is NaN
      for (uint64_t i = 0; i < format.hidden; ++i) record[i] = value;
      DequantizeRows(format, 1, record.data(), reinterpret_cast<std::byte*>(row.data()));
      for (const float element : row) EXPECT_TRUE(std::isnan(element));
    }
  }
}

TEST(Fp8Rows, ARecordIsPaddedTo32Bytes) {
  Fp8Rows format{.hidden = 7168, .block = 128, .scale = Fp8Scale::kF32};
  EXPECT_EQ(format.record_bytes(), 7392u);
  format.scale = Fp8Scale::kUe8m0;
  EXPECT_EQ(format.record_bytes(), 7232u);
}

}  // namespace
}  // namespace jax_ep
