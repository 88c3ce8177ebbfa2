// The 32-bit immediate, and the extension of low bits to 64-bit counters.
#include "proxy/abi/imm.h"

#include <gtest/gtest.h>

#include <random>

#include "proxy/blame.h"

namespace jax_ep {
namespace {

TEST(Imm, has_these_golden_bits) {
  constexpr uint32_t kFlow = 0x2A5 * kNumChannels + static_cast<uint32_t>(Channel::kLlCombine);
  constexpr auto kBits =
      TryEncodeImm(Imm{.kind = ImmKind::kCount, .flow = kFlow, .epoch = 0xB, .payload = 0x0ABC});
  static_assert(kBits.has_value());
  // mark << 31 | peer << 21 | channel << 17 | epoch << 13 | payload
  EXPECT_EQ(*kBits, (1u << 31) | (0x2A5u << 21) | (10u << 17) | (0xBu << 13) | 0x0ABCu);
  EXPECT_EQ(*kBits, 0xD4B56ABCu);
  constexpr auto kAck = TryEncodeImm(Imm{.kind = ImmKind::kControl,
                                         .flow = kFlow,
                                         .epoch = static_cast<uint32_t>(ImmControl::kAck),
                                         .payload = 1});
  EXPECT_EQ(kAck.value(), (0x2A5u << 21) | (14u << 17) | (10u << 13) | 1u);
}

// Of groups of up to 8,189 ranks in all teams everyone has a name, of larger ones the first ranks.
TEST(Imm, names_whom_a_failure_is_blamed_on) {
  for (const uint32_t num_teams : {1u, 2u, 3u, 8u, 63u, 1024u, 8189u, 9000u}) {
    uint32_t num_named = 0;
    for (uint32_t team = 0; team < num_teams; ++team) {
      for (const uint32_t rank : {0u, 1u, 7u, 128u, kMaxRanks - 1}) {
        const int64_t blamed = RankOfTeam(team, rank);
        const uint32_t payload = BlamePayload(blamed, num_teams);
        ASSERT_LE(payload, BitMask(kImmPayloadBits));
        ASSERT_NE(payload, 0u);
        const bool has_name = uint64_t{rank} * num_teams + team < 8189;
        ASSERT_EQ(BlamedBy(payload, num_teams), has_name ? blamed : FailureLatch::kUnnamed);
        num_named += has_name ? 1 : 0;
      }
    }
    EXPECT_GE(num_named, num_teams == 9000 ? 8189u : num_teams);
    for (const int64_t blamed :
         {FailureLatch::kNobody, FailureLatch::kUnnamed, FailureLatch::kAgreement}) {
      EXPECT_EQ(BlamedBy(BlamePayload(blamed, num_teams), num_teams), blamed);
    }
  }
}

TEST(Imm, any_32_bits_that_somebody_sends_round_trip) {
  std::mt19937 random(3);
  int num_unknown = 0;
  for (int i = 0; i < 200'000; ++i) {
    const uint32_t bits = static_cast<uint32_t>(random());
    const Imm imm = DecodeImm(bits);
    const auto again = TryEncodeImm(imm);
    if (imm.kind == ImmKind::kUnknown) {
      ++num_unknown;
      ASSERT_FALSE(again.has_value());
      continue;
    }
    ASSERT_TRUE(again.has_value());
    ASSERT_EQ(*again, bits);
  }
  EXPECT_NEAR(num_unknown, 200'000 / 16, 1000);  // a mark, and one of two channels of 16
}

// Every kind, from the last of 1,024 ranks on every channel, at the edges of each field.
TEST(Imm, reaches_1024_peers_on_every_channel) {
  static_assert(kMaxFlows == 1024 * kNumChannels);
  for (const uint32_t peer : {0u, 1u, 511u, 512u, 1022u, 1023u}) {
    for (uint32_t channel = 0; channel < kImmAckChannel; ++channel) {
      const bool is_counted = IsCounted(static_cast<Channel>(channel));
      for (const Imm& imm :
           {Imm{.kind = is_counted ? ImmKind::kSlot : ImmKind::kData, .epoch = 15},
            Imm{.kind = is_counted ? ImmKind::kCount : ImmKind::kSignal, .payload = 8191},
            Imm{.kind = ImmKind::kControl, .epoch = static_cast<uint32_t>(ImmControl::kAck)}}) {
        Imm sent = imm;
        sent.flow = peer * kNumChannels + channel;
        const auto bits = TryEncodeImm(sent);
        ASSERT_TRUE(bits.has_value());
        const Imm got = DecodeImm(*bits);
        EXPECT_EQ(got.kind, sent.kind);
        EXPECT_EQ(got.flow, sent.flow);
        EXPECT_EQ(got.epoch, sent.epoch);
        EXPECT_EQ(got.payload, sent.payload);
      }
    }
    const auto bye = TryEncodeImm(Imm{.kind = ImmKind::kControl,
                                      .flow = peer * kNumChannels,
                                      .epoch = static_cast<uint32_t>(ImmControl::kBye)});
    EXPECT_EQ(DecodeImm(bye.value()).flow / kNumChannels, peer);
  }
}

TEST(Imm, that_does_not_fit_is_refused) {
  EXPECT_FALSE(TryEncodeImm(Imm{.flow = kMaxFlows}).has_value());
  EXPECT_FALSE(TryEncodeImm(Imm{.epoch = 16}).has_value());
  EXPECT_FALSE(TryEncodeImm(Imm{.payload = kSequenceSpace}).has_value());
  const auto counted = static_cast<uint32_t>(Channel::kLlDispatch);
  const auto sequenced = static_cast<uint32_t>(Channel::kPlan);
  EXPECT_FALSE(TryEncodeImm(Imm{.kind = ImmKind::kData, .flow = counted}).has_value());
  EXPECT_FALSE(TryEncodeImm(Imm{.kind = ImmKind::kSlot, .flow = sequenced}).has_value());
  EXPECT_FALSE(TryEncodeImm(Imm{.kind = ImmKind::kData, .flow = kImmAckChannel}).has_value());
  EXPECT_FALSE(TryEncodeImm(Imm{.kind = ImmKind::kUnknown}).has_value());
  EXPECT_FALSE(TryEncodeImm(Imm{.kind = ImmKind::kControl, .epoch = 17}).has_value());
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
