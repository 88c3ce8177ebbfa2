// The 32-bit immediate, and the extension of low bits to 64-bit counters.
#include "proxy/abi/imm.h"

#include <gtest/gtest.h>

#include <random>

namespace jax_ep {
namespace {

TEST(Imm, has_these_golden_bits) {
  constexpr auto kBits =
      TryEncodeImm(Imm{.kind = ImmKind::kCounted, .flow = 0x1234, .epoch = 0xB, .payload = 0x0ABC});
  static_assert(kBits.has_value());
  // kind << 30 | flow << 17 | epoch << 13 | payload
  EXPECT_EQ(*kBits, (2u << 30) | (0x1234u << 17) | (0xBu << 13) | 0x0ABCu);
  EXPECT_EQ(*kBits, 0xA4696ABCu);
}

TEST(Imm, any_32_bits_round_trip) {
  std::mt19937 random(3);
  for (int i = 0; i < 200'000; ++i) {
    const uint32_t bits = static_cast<uint32_t>(random());
    const auto again = TryEncodeImm(DecodeImm(bits));
    ASSERT_TRUE(again.has_value());
    ASSERT_EQ(*again, bits);
  }
}

TEST(Imm, that_does_not_fit_is_refused) {
  EXPECT_FALSE(TryEncodeImm(Imm{.flow = kMaxFlows}).has_value());
  EXPECT_FALSE(TryEncodeImm(Imm{.epoch = 16}).has_value());
  EXPECT_FALSE(TryEncodeImm(Imm{.payload = kSequenceSpace}).has_value());
}

TEST(ExtendNearest, finds_every_value_within_half_the_space) {
  constexpr int kBits = 5;
  constexpr int64_t kHalf = 16;
  for (int64_t reference = 0; reference < 200; ++reference) {
    for (int64_t distance = -kHalf + 1; distance <= kHalf; ++distance) {
      const int64_t value = reference + distance;
      if (value < 0) continue;
      EXPECT_EQ(
          ExtendNearest(static_cast<uint64_t>(reference), static_cast<uint64_t>(value) & 31, kBits),
          static_cast<uint64_t>(value));
    }
  }
}

TEST(ExtendNearest, never_goes_below_zero) {
  for (uint64_t low = 0; low < 32; ++low) {
    for (uint64_t reference = 0; reference < 16; ++reference) {
      const uint64_t value = ExtendNearest(reference, low, 5);
      EXPECT_EQ(value & 31, low);
      EXPECT_LT(value, 64u);
    }
  }
}

TEST(ExtendNearest, works_at_the_end_of_64_bits) {
  const uint64_t reference = UINT64_MAX - 3;
  EXPECT_EQ(ExtendNearest(reference, (reference + 2) & 31, 5), reference + 2);
  EXPECT_EQ(ExtendNearest(reference, (reference - 7) & 31, 5), reference - 7);
}

}  // namespace
}  // namespace jax_ep
