// Parts cover a call's tokens, in order, without gaps, and begin at chunks. Needs no GPU.
#include "kernels/gpu/token_parts.h"

#include <gtest/gtest.h>

namespace jax_ep::gpu {
namespace {

TEST(TokenParts, CoverAllTokensInOrder) {
  for (uint64_t num_tokens = 0; num_tokens < 200; ++num_tokens) {
    const uint32_t count = NumTokenParts(num_tokens, 2);
    uint64_t end = 0;
    for (uint32_t number = 0; number < count; ++number) {
      const TokenPart part = TokenPartOf(num_tokens, number, count);
      EXPECT_EQ(part.begin, end) << num_tokens << " tokens, part " << number;
      EXPECT_EQ(part.begin % kNetChunkTokens, 0) << num_tokens << " tokens, part " << number;
      EXPECT_TRUE(part.num_tokens() > 0 || num_tokens == 0) << num_tokens << " tokens";
      EXPECT_EQ(part.IsFirst(), number == 0);
      EXPECT_EQ(part.IsLast(), number + 1 == count);
      end = part.end;
    }
    EXPECT_EQ(end, num_tokens);
  }
}

TEST(TokenParts, AreAlikeInSize) {
  constexpr uint64_t kTokens = 4096;
  const uint32_t count = NumTokenParts(kTokens, 2);
  EXPECT_GT(count, 1u);
  for (uint32_t number = 0; number < count; ++number) {
    EXPECT_EQ(TokenPartOf(kTokens, number, count).num_tokens(), kTokens / count);
  }
}

TEST(TokenParts, OneNodeHasOne) {
  EXPECT_EQ(NumTokenParts(4096, 1), 1u);
  EXPECT_EQ(TokenPartOf(4095, 0, 1).end, 4095u);
}

}  // namespace
}  // namespace jax_ep::gpu
