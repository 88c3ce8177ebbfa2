#include "kernels/cpu/rows.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/kernels/oracle.h"

namespace jax_ep {
namespace {

using testing::DecodeElem;

constexpr ElemType kSmallTypes[] = {ElemType::kBf16, ElemType::kF16};

std::vector<std::byte> AllBitPatterns() {
  std::vector<std::byte> rows(65536 * 2);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto narrowed = static_cast<uint16_t>(bits);
    std::memcpy(rows.data() + 2 * bits, &narrowed, sizeof(narrowed));
  }
  return rows;
}

TEST(Rows, EveryElementLoadsExactly) {
  const auto rows = AllBitPatterns();
  for (const ElemType type : kSmallTypes) {
    std::vector<float> floats(65536);
    LoadScaled(type, floats.data(), rows.data(), 1.0f, floats.size());
    for (size_t i = 0; i < floats.size(); ++i) {
      const double want = DecodeElem(type, rows.data() + 2 * i);
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(floats[i]));
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(floats[i]),
                  std::bit_cast<uint32_t>(static_cast<float>(want)))
            << i;
      }
    }
  }
}

TEST(Rows, EveryElementSurvivesARoundTrip) {
  const auto rows = AllBitPatterns();
  for (const ElemType type : kSmallTypes) {
    std::vector<float> floats(65536);
    std::vector<std::byte> stored(rows.size());
    LoadScaled(type, floats.data(), rows.data(), 1.0f, floats.size());
    StoreRounded(type, stored.data(), floats.data(), floats.size());
    for (size_t i = 0; i < floats.size(); ++i) {
      if (std::isnan(floats[i])) {
        EXPECT_TRUE(std::isnan(DecodeElem(type, stored.data() + 2 * i)));
      } else {
        ASSERT_EQ(std::memcmp(stored.data() + 2 * i, rows.data() + 2 * i, 2), 0) << i;
      }
    }
  }
}

// The result is one of the two neighbours, the nearer, or the even one of a tie.
TEST(Rows, StoresRoundToNearestEven) {
  std::mt19937 random(3);
  for (const ElemType type : kSmallTypes) {
    std::vector<float> floats;
    const int shift = type == ElemType::kBf16 ? 16 : 13;
    for (int i = 0; i < 40000; ++i) {
      auto bits = static_cast<uint32_t>(random());
      if (type == ElemType::kF16) {  // exponents around the range of f16, subnormals included
        bits = (bits & 0x807fffffu) | (static_cast<uint32_t>(100 + random() % 45) << 23);
      }
      if (i % 2 == 0) bits = (bits >> shift << shift) | (1u << (shift - 1));  // ties
      const auto value = std::bit_cast<float>(bits);
      if (std::isfinite(value)) floats.push_back(value);
    }
    std::vector<std::byte> stored(floats.size() * 2);
    StoreRounded(type, stored.data(), floats.data(), floats.size());
    const double largest = type == ElemType::kBf16 ? 0x1.fep127 : 65504.0;
    for (size_t i = 0; i < floats.size(); ++i) {
      uint16_t bits;
      std::memcpy(&bits, stored.data() + 2 * i, sizeof(bits));
      const double got = DecodeElem(type, stored.data() + 2 * i);
      const double value = floats[i];
      if (std::isinf(got)) {
        // Half a unit beyond the largest is where infinity begins.
        const double half_unit = largest * (type == ElemType::kBf16 ? 0x1p-9 : 0x1p-12);
        ASSERT_GE(std::abs(value), largest + half_unit * 0.99);
        continue;
      }
      const auto neighbour = [&](int step) {
        const auto next = static_cast<uint16_t>(bits + step);
        return DecodeElem(type, reinterpret_cast<const std::byte*>(&next));
      };
      const double error = std::abs(got - value);
      for (const int step : {-1, 1}) {
        if ((bits & 0x7fff) == 0 && step == -1) continue;
        const double other = std::abs(neighbour(step) - value);
        if (std::isnan(other)) continue;
        ASSERT_LE(error, other) << value;
        if (error == other && error > 0) {
          ASSERT_EQ(bits & 1, 0) << value;
        }
      }
      ASSERT_EQ(std::signbit(got), std::signbit(value));
    }
  }
}

TEST(Rows, RoundFloatsIsStoreThenLoad) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (const ElemType type : {ElemType::kF32, ElemType::kBf16, ElemType::kF16}) {
    std::vector<float> floats(1001);
    for (float& value : floats) value = normal(random);
    std::vector<std::byte> stored(floats.size() * ElemBytes(type));
    std::vector<float> loaded(floats.size());
    StoreRounded(type, stored.data(), floats.data(), floats.size());
    LoadScaled(type, loaded.data(), stored.data(), 1.0f, loaded.size());
    RoundFloats(type, floats.data(), floats.size());
    EXPECT_EQ(floats, loaded);
  }
}

// The dot product's order is part of the semantics: lanes by index modulo 256, then a tree.
TEST(Rows, DotAddsIn256Lanes) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (const size_t count : {0u, 1u, 255u, 256u, 257u, 1025u}) {
    std::vector<float> a(count), b(count);
    for (size_t i = 0; i < count; ++i) {
      a[i] = normal(random);
      b[i] = normal(random);
    }
    float lanes[256] = {};
    for (size_t i = 0; i < count; ++i) {
      const volatile float product = a[i] * b[i];  // volatile: no contraction here
      lanes[i % 256] += product;
    }
    for (size_t width = 128; width > 0; width /= 2) {
      for (size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    const float got = DotRows(ElemType::kF32, reinterpret_cast<const std::byte*>(a.data()),
                              reinterpret_cast<const std::byte*>(b.data()), count);
    EXPECT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(lanes[0])) << count;
  }
}

TEST(Rows, SumsAreNotContracted) {
  // 1 + 2^-12 squared is 1 + 2^-11 + 2^-24; the product rounds the last term away, FMA keeps it.
  const float x = 1.0f + 0x1p-12f;
  std::vector<float> acc(37, -(x * x));
  const std::vector<float> row(37, x);
  AddScaled(ElemType::kF32, acc.data(), reinterpret_cast<const std::byte*>(row.data()), x,
            acc.size());
  for (const float value : acc) EXPECT_EQ(value, 0.0f);
}

TEST(StreamCopy, copies_exactly_its_bytes_at_any_alignment_and_size) {
  for (const size_t offset : {0, 1, 8, 16, 63}) {
    for (const size_t num_bytes : {0, 1, 15, 63, 64, 65, 127, 128, 1000, 8192}) {
      std::vector<std::byte> src(num_bytes + 1), dst(offset + num_bytes + 128, std::byte{0xee});
      for (size_t i = 0; i < num_bytes; ++i) src[i + 1] = static_cast<std::byte>(i * 7 + 1);
      StreamCopy(dst.data() + offset, src.data() + 1, num_bytes);
      StreamFence();
      for (size_t i = 0; i < dst.size(); ++i) {
        const bool is_inside = i >= offset && i < offset + num_bytes;
        ASSERT_EQ(dst[i], is_inside ? src[i - offset + 1] : std::byte{0xee})
            << "byte " << i << " of " << num_bytes << " at " << offset;
      }
    }
  }
}

}  // namespace
}  // namespace jax_ep
