// Slices cover a call's tokens, in order, without gaps, and begin at chunks. Needs no GPU.
#include "kernels/gpu/network/token_slices.h"

#include <gtest/gtest.h>

namespace jax_ep::gpu {
namespace {

TEST(TokenSlices, CoverAllTokensInOrder) {
  for (uint64_t i = 0; i < 400; ++i) {
    const uint64_t num_tokens = i / 2;
    const bool has_fast_wire = i % 2 == 0;
    const uint32_t count = NumTokenSlices(num_tokens, 2, has_fast_wire);
    uint64_t end = 0;
    for (uint32_t number = 0; number < count; ++number) {
      const TokenSlice slice = TokenSliceOf(num_tokens, number, count);
      EXPECT_EQ(slice.begin, end) << num_tokens << " tokens, slice " << number;
      EXPECT_EQ(slice.begin % kNetChunkTokens, 0) << num_tokens << " tokens, slice " << number;
      EXPECT_TRUE(slice.num_tokens() > 0 || num_tokens == 0) << num_tokens << " tokens";
      EXPECT_EQ(slice.IsFirst(), number == 0);
      EXPECT_EQ(slice.IsLast(), number + 1 == count);
      end = slice.end;
    }
    EXPECT_EQ(end, num_tokens);
  }
}

TEST(TokenSlices, AreAlikeInSize) {
  constexpr uint64_t kTokens = 4096;
  for (const bool has_fast_wire : {false, true}) {
    const uint32_t count = NumTokenSlices(kTokens, 2, has_fast_wire);
    EXPECT_EQ(count, has_fast_wire ? kMostSlicesOfFastWire : kMostTokenSlices);
    for (uint32_t number = 0; number < count; ++number) {
      EXPECT_EQ(TokenSliceOf(kTokens, number, count).num_tokens(), kTokens / count);
    }
  }
}

TEST(TokenSlices, OneNodeHasOne) {
  EXPECT_EQ(NumTokenSlices(4096, 1, /*has_fast_wire=*/false), 1u);
  EXPECT_EQ(TokenSliceOf(4095, 0, 1).end, 4095u);
}

}  // namespace
}  // namespace jax_ep::gpu
