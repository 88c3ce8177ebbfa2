// Quotients and remainders are those of the processor's division. Needs no GPU.
#include "kernels/gpu/device/divisor.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>

namespace jax_ep::gpu {
namespace {

constexpr uint32_t kEnd = uint32_t{1} << 31;  // of dividends

void ExpectDivides(uint32_t divisor, uint32_t dividend) {
  const Divisor by(divisor);
  EXPECT_EQ(by.Quotient(dividend), dividend / divisor) << dividend << " by " << divisor;
  EXPECT_EQ(by.Remainder(dividend), dividend % divisor) << dividend << " by " << divisor;
}

TEST(Divisor, DividesNextToMultiples) {
  for (uint32_t divisor = 1; divisor < 3000; ++divisor) {
    const uint32_t last = (kEnd - 1) / divisor * divisor;
    for (const uint32_t multiple : {0u, divisor, 7 * divisor, last / divisor / 2 * divisor, last}) {
      for (const uint32_t dividend : {multiple - 1, multiple, multiple + 1}) {
        if (dividend < kEnd) ExpectDivides(divisor, dividend);
      }
    }
  }
}

TEST(Divisor, DividesByPowersOfTwoAndTheirNeighbours) {
  for (uint32_t shift = 0; shift <= 31; ++shift) {
    for (const int64_t step : {-1, 0, 1}) {
      const int64_t divisor = (int64_t{1} << shift) + step;
      if (divisor < 1 || divisor > kEnd) continue;
      for (const uint32_t dividend : {0u, 1u, kEnd / 2 - 1, kEnd / 2, kEnd - 2, kEnd - 1}) {
        ExpectDivides(static_cast<uint32_t>(divisor), dividend);
      }
    }
  }
}

TEST(Divisor, DividesAnything) {
  std::mt19937 random(7);
  std::uniform_int_distribution<uint32_t> any(0, kEnd - 1), any_shift(0, 30);
  for (int i = 0; i < 1'000'000; ++i) {
    const uint32_t divisor = 1 + (any(random) >> any_shift(random));
    ExpectDivides(divisor, any(random));
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace jax_ep::gpu
