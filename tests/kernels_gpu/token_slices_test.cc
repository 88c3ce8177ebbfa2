// Slices cover a call's tokens, in order, without gaps, and begin at chunks; rounds are no longer
// than areas have room for. Needs no GPU.
#include "kernels/gpu/network/token_slices.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace jax_ep::gpu {
namespace {

std::vector<TokenSlice> SlicesOf(const TokenCut& cut) {
  std::vector<TokenSlice> slices;
  for (uint32_t number = 0; number < cut.num_slices(); ++number) {
    slices.push_back(cut.SliceOf(number));
  }
  return slices;
}

std::vector<uint64_t> SizesOf(const TokenCut& cut) {
  std::vector<uint64_t> sizes;
  for (const TokenSlice& slice : SlicesOf(cut)) sizes.push_back(slice.num_tokens());
  return sizes;
}

TEST(TokenSlices, CoverAllTokensInOrder) {
  for (const HtRounds rounds :
       {HtRounds{.tokens = 200}, HtRounds{.tokens = 128, .are_several = true},
        HtRounds{.tokens = 96, .are_several = true}, HtRounds{.tokens = 32, .are_several = true}}) {
    for (uint64_t i = 0; i < 2000; ++i) {
      const uint64_t num_tokens = i / 10;
      const bool has_fast_wire = i % 2 == 0;
      const uint64_t num_least = i / 2 % 5 == 4 ? ~uint64_t{0} : i / 2 % 5;
      SCOPED_TRACE(std::to_string(num_tokens) + " tokens, rounds of " +
                   std::to_string(rounds.tokens));
      const std::vector<TokenSlice> slices =
          SlicesOf(TokenCut(num_tokens, rounds, 2, has_fast_wire, num_least));
      uint64_t end = 0;
      for (uint32_t number = 0; number < slices.size(); ++number) {
        const TokenSlice& slice = slices[number];
        ASSERT_EQ(slice.number, number);
        ASSERT_EQ(slice.count, slices.size());
        ASSERT_EQ(slice.begin, end);
        ASSERT_EQ(slice.begin % kNetChunkTokens, 0u);
        ASSERT_TRUE(slice.num_tokens() > 0 || num_tokens == 0);
        ASSERT_EQ(slice.IsFirst(), number == 0);
        ASSERT_EQ(slice.IsLast(), number + 1 == slices.size());
        ASSERT_LE(slice.end - slice.round_begin(), rounds.tokens);
        ASSERT_LT(slice.number_in_round(), kMostTokenSlices);
        end = slice.end;
      }
      ASSERT_EQ(end, num_tokens);
    }
  }
}

TEST(TokenSlices, AreRoundsWhereThereAreSeveral) {
  constexpr uint64_t kRoundTokens = 96;
  for (const bool has_fast_wire : {false, true}) {
    const std::vector<TokenSlice> slices = SlicesOf(TokenCut(
        9 * kRoundTokens + 33, {.tokens = kRoundTokens, .are_several = true}, 2, has_fast_wire));
    ASSERT_EQ(slices.size(), 10u);
    for (const TokenSlice& slice : slices) {
      EXPECT_EQ(slice.round(), slice.number);
      EXPECT_EQ(slice.round_begin(), slice.begin);
      EXPECT_EQ(slice.number_in_round(), 0u);
      EXPECT_TRUE(slice.BeginsRound() && slice.EndsRound());
      // It takes the places of the round two before: of that and all earlier ones the node is
      // through.
      EXPECT_EQ(slice.num_left(), slice.number < 2 ? 0 : slice.number - 1);
    }
  }
}

// What fits a round is cut all the same, so that kernels and wire overlap, and evenly.
TEST(TokenSlices, OfSeveralRoundsAreNoFewerThanOfOne) {
  constexpr HtRounds kRounds{.tokens = 1024, .are_several = true};
  for (const bool has_fast_wire : {false, true}) {
    for (const uint64_t num_tokens :
         {uint64_t{32}, uint64_t{100}, uint64_t{1024}, uint64_t{1100}}) {
      const TokenCut cut(num_tokens, kRounds, 4, has_fast_wire);
      const TokenCut of_one(num_tokens, {.tokens = 4096}, 4, has_fast_wire);
      // Two short ones make one.
      const auto most =
          static_cast<uint32_t>(has_fast_wire ? kMostSlicesOfFastWire - 1 : kMostTokenSlices);
      EXPECT_EQ(cut.num_slices(), std::min(of_one.num_slices(), most));
    }
  }
  EXPECT_EQ(TokenCut(16384, kRounds, 4, /*has_fast_wire=*/true).num_slices(), 16u);
  EXPECT_EQ(
      SizesOf(TokenCut(4096, {.tokens = 1344, .are_several = true}, 3, /*has_fast_wire=*/true)),
      std::vector<uint64_t>(4, 1024));
}

TEST(TokenSlices, AreOneRoundElse) {
  const std::vector<TokenSlice> slices =
      SlicesOf(TokenCut(1000, {.tokens = 1000}, 2, /*has_fast_wire=*/true));
  ASSERT_EQ(slices.size(), kMostSlicesOfFastWire);
  for (const TokenSlice& slice : slices) {
    EXPECT_EQ(slice.round(), 0u);
    EXPECT_EQ(slice.round_begin(), 0u);
    EXPECT_EQ(slice.number_in_round(), slice.number);
    EXPECT_EQ(slice.BeginsRound(), slice.IsFirst());
    EXPECT_EQ(slice.EndsRound(), slice.IsLast());
    EXPECT_EQ(slice.num_left(), 0u);
  }
}

TEST(TokenSlices, AreAlikeOrShortAtBothEnds) {
  constexpr uint64_t kTokens = 4096;
  const HtRounds one{.tokens = kTokens};
  EXPECT_EQ(SizesOf(TokenCut(kTokens, one, 2, /*has_fast_wire=*/false)),
            std::vector<uint64_t>(kMostTokenSlices, kTokens / kMostTokenSlices));
  EXPECT_EQ(SizesOf(TokenCut(kTokens, one, 2, /*has_fast_wire=*/true)),
            (std::vector<uint64_t>{512, 1024, 1024, 1024, 512}));
  // As many chunks as shares, and one less, which cannot be cut so.
  EXPECT_EQ(SizesOf(TokenCut(8 * kNetChunkTokens, one, 2, /*has_fast_wire=*/true)),
            (std::vector<uint64_t>{32, 64, 64, 64, 32}));
  EXPECT_EQ(SizesOf(TokenCut(7 * kNetChunkTokens, one, 2, /*has_fast_wire=*/true)),
            (std::vector<uint64_t>{32, 32, 64, 32, 64}));
}

// A slice more costs a call more than it hides, but for rows that take the wire as long.
TEST(TokenSlices, AreNoMoreThanPay) {
  constexpr uint64_t kTokens = 4096;
  const HtRounds one{.tokens = kTokens};
  const auto sizes_of = [&](bool has_fast_wire, uint64_t num_least) {
    return SizesOf(TokenCut(kTokens, one, 2, has_fast_wire, num_least));
  };
  EXPECT_EQ(sizes_of(true, 0), std::vector<uint64_t>{kTokens});
  EXPECT_EQ(sizes_of(true, 1), std::vector<uint64_t>{kTokens});
  EXPECT_EQ(sizes_of(true, 2), (std::vector<uint64_t>{2048, 2048}));
  EXPECT_EQ(sizes_of(true, 3), (std::vector<uint64_t>{2048, 2048}));
  EXPECT_EQ(sizes_of(true, 4), (std::vector<uint64_t>{1024, 2048, 1024}));
  EXPECT_EQ(sizes_of(true, 8), (std::vector<uint64_t>{512, 1024, 1024, 1024, 512}));
  EXPECT_EQ(sizes_of(false, 0), std::vector<uint64_t>{kTokens});
  EXPECT_EQ(sizes_of(false, 3).size(), 3u);
  // No slice is shorter than one that pays.
  for (const bool has_fast_wire : {false, true}) {
    for (uint64_t num_least = 1; num_least < 20; ++num_least) {
      for (const uint64_t size : sizes_of(has_fast_wire, num_least)) {
        EXPECT_GE(size + kNetChunkTokens, kTokens / num_least);
      }
    }
  }
  // Rounds are as many as they must be.
  constexpr HtRounds kRounds{.tokens = 1024, .are_several = true};
  EXPECT_EQ(TokenCut(kTokens, kRounds, 4, /*has_fast_wire=*/true, 0).num_slices(), 4u);
  EXPECT_EQ(TokenCut(1024, kRounds, 4, /*has_fast_wire=*/true, 1).num_slices(), 1u);
}

// DeepSeek-V3's rows.
TEST(TokenSlices, PayByTheTimeOfTheWire) {
  const auto num_slices = [](uint64_t num_tokens, bool has_fast_wire) {
    const uint64_t num_bytes = num_tokens * 2 * 7168;
    return TokenCut(num_tokens, {.tokens = num_tokens}, 2, has_fast_wire,
                    num_bytes / LeastSliceBytes(has_fast_wire))
        .num_slices();
  };
  EXPECT_EQ(num_slices(512, /*has_fast_wire=*/true), 1u);
  EXPECT_EQ(num_slices(1024, /*has_fast_wire=*/true), 2u);
  EXPECT_EQ(num_slices(2048, /*has_fast_wire=*/true), 3u);
  EXPECT_EQ(num_slices(4096, /*has_fast_wire=*/true), kMostSlicesOfFastWire);
  EXPECT_EQ(num_slices(64, /*has_fast_wire=*/false), 1u);
  EXPECT_EQ(num_slices(256, /*has_fast_wire=*/false), 3u);
  EXPECT_EQ(num_slices(1024, /*has_fast_wire=*/false), kMostTokenSlices);
}

TEST(TokenSlices, SpanHasTheSlicesOfACut) {
  const TokenCut cut(1000, {.tokens = 1000}, 2, /*has_fast_wire=*/true);
  const SliceSpan span(cut, 1, 4);
  ASSERT_EQ(span.count(), 3u);
  for (uint32_t i = 0; i < span.count(); ++i) EXPECT_EQ(span.At(i).number, 1 + i);
  EXPECT_EQ(span.begin(), cut.SliceOf(1).begin);
  EXPECT_EQ(span.num_tokens(), cut.SliceOf(3).end - cut.SliceOf(1).begin);
}

TEST(TokenSlices, OneNodeHasOne) {
  const std::vector<TokenSlice> slices =
      SlicesOf(TokenCut(4095, {.tokens = 4096}, 1, /*has_fast_wire=*/false));
  ASSERT_EQ(slices.size(), 1u);
  EXPECT_EQ(slices[0].end, 4095u);
  EXPECT_TRUE(slices[0].IsFirst() && slices[0].IsLast() && slices[0].EndsRound());
}

TEST(TokenSlices, AllOfARoundOrTwoRoundsAreSentAhead) {
  const auto order_of = [](uint64_t num_tokens, const HtRounds& rounds, bool sends_round = false) {
    std::string order;
    const TokenCut cut(num_tokens, rounds, 2, /*has_fast_wire=*/true);
    const auto send = [&](const SliceSpan& slices) -> const char* {
      order += " s";
      for (uint32_t i = 0; i < slices.count(); ++i) order += std::to_string(slices.At(i).number);
      return nullptr;
    };
    const auto use = [&](const TokenSlice& slice) -> const char* {
      order += " u" + std::to_string(slice.number);
      return nullptr;
    };
    EXPECT_EQ(cut.ForEachSlice(sends_round, send, use), nullptr);
    return order;
  };
  constexpr HtRounds kRounds{.tokens = 32, .are_several = true};
  EXPECT_EQ(order_of(0, {.tokens = 96}), " s0 u0");
  EXPECT_EQ(order_of(96, {.tokens = 96}), " s0 s1 s2 u0 u1 u2");
  EXPECT_EQ(order_of(0, kRounds), " s0 u0");
  EXPECT_EQ(order_of(32, kRounds), " s0 u0");
  EXPECT_EQ(order_of(128, kRounds), " s0 s1 u0 s2 u1 s3 u2 u3");
  EXPECT_EQ(order_of(96, {.tokens = 96}, /*sends_round=*/true), " s012 u0 u1 u2");
  EXPECT_EQ(order_of(0, {.tokens = 96}, /*sends_round=*/true), " s0 u0");
  EXPECT_EQ(order_of(128, kRounds, /*sends_round=*/true), " s0 s1 u0 s2 u1 s3 u2 u3");
  const TokenCut cut(96, kRounds, 2, /*has_fast_wire=*/true);
  const auto send = [](const SliceSpan&) -> const char* { return nullptr; };
  EXPECT_STREQ(cut.ForEachSlice(false, send, [](const TokenSlice&) { return "lost"; }), "lost");
}

// As many tokens as areas have room for, in whole chunks; tests ask for fewer.
TEST(HtRounds, FollowFromTheShape) {
  const auto expect = [](uint32_t num_ranks, uint32_t node_size, uint64_t max_tokens,
                         uint64_t limit, uint64_t tokens, bool are_several) {
    GroupShape shape;
    shape.num_ranks = num_ranks;
    shape.node_size = node_size;
    shape.max_tokens = max_tokens;
    shape.round_tokens = limit;
    const HtRounds rounds = HtRoundsOf(shape);
    EXPECT_EQ(rounds.tokens, tokens) << num_ranks << " in nodes of " << node_size;
    EXPECT_EQ(rounds.are_several, are_several) << num_ranks << " in nodes of " << node_size;
  };
  expect(64, 64, 4096, 0, 4096, false);
  expect(64, 64, 4096, 32, 4096, false);
  expect(16, 8, 4096, 0, 4096, false);
  expect(2, 1, 4095, 0, 4095, false);
  expect(16, 4, 4096, 0, 4096, false);
  expect(4, 1, 4096, 0, 4096, false);
  expect(8, 1, 4096, 0, 1024, true);
  expect(32, 16, 4096, 0, 1024, true);
  expect(128, 64, 4096, 0, 256, true);
  expect(24, 8, 4096, 0, 1344, true);
  expect(64, 8, 4096, 0, 512, true);
  expect(256, 8, 4096, 0, 128, true);
  expect(1024, 8, 4096, 0, kNetChunkTokens, true);
  expect(1024, 64, 4096, 0, kNetChunkTokens, true);
  expect(1024, 8, 20, 0, 20, false);
  expect(16, 8, 4096, 100, 96, true);
  expect(16, 8, 4096, 1, kNetChunkTokens, true);
  expect(16, 8, 4096, 4096, 4096, false);
  expect(16, 8, 0, 0, 0, false);
}

}  // namespace
}  // namespace jax_ep::gpu
