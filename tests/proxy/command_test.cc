// The 16-byte command: golden bytes, round trip, and refusal of everything that does not fit.
#include "proxy/abi/command.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string_view>

namespace jax_ep {
namespace {

void ExpectEqual(const Command& a, const Command& b) {
  EXPECT_EQ(a.op, b.op);
  EXPECT_EQ(a.dst_rank, b.dst_rank);
  EXPECT_EQ(a.length_bytes, b.length_bytes);
  EXPECT_EQ(a.local_offset, b.local_offset);
  EXPECT_EQ(a.remote_offset, b.remote_offset);
  EXPECT_EQ(a.channel, b.channel);
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.value, b.value);
}

constexpr Command kLargest{.op = Op::kWriteSignal,
                           .dst_rank = 1023,
                           .length_bytes = uint64_t{16} << 20,
                           .local_offset = (uint64_t{1} << 40) - 16,
                           .remote_offset = (uint64_t{1} << 40) - 16,
                           .channel = static_cast<Channel>(kNumChannels - 1),
                           .epoch = 15,
                           .value = 4095};

// The numbers below were worked out by hand from the table in command.h: a change of the format
// must fail here.
TEST(Command, has_these_golden_bytes) {
  constexpr auto kPacked = TryPack(Command{.op = Op::kWriteSignal,
                                           .dst_rank = 0x155,
                                           .length_bytes = 0x12345 * 16,
                                           .local_offset = uint64_t{0xA'1234'5678} * 16,
                                           .remote_offset = uint64_t{0x3'9ABC'DEF0} * 16,
                                           .channel = Channel::kCombine,
                                           .epoch = 0xC,
                                           .value = 0x7B3});
  static_assert(kPacked.has_value());
  EXPECT_EQ(kPacked->words[0], 0x9ABCDEF012345678u);
  // value | epoch << 12 | channel << 16 | (length - 1) << 22 | rank << 42 | op << 52 |
  // remote high << 55 | local high << 59
  EXPECT_EQ(kPacked->words[1], uint64_t{0x7B3} | uint64_t{0xC} << 12 | uint64_t{6} << 16 |
                                   uint64_t{0x12344} << 22 | uint64_t{0x155} << 42 |
                                   uint64_t{1} << 52 | uint64_t{3} << 55 | uint64_t{0xA} << 59);
  EXPECT_EQ(kPacked->words[1], 0x51955448D106C7B3u);
}

TEST(Command, that_is_all_default_packs_to_zero_words) {
  const auto packed = TryPack(Command{.length_bytes = 16});
  ASSERT_TRUE(packed.has_value());
  EXPECT_EQ(packed->words[0], 0u);
  EXPECT_EQ(packed->words[1], 0u);
}

TEST(Command, with_every_field_at_its_limit_round_trips_and_leaves_the_lap_bit_clear) {
  const auto packed = TryPack(kLargest);
  ASSERT_TRUE(packed.has_value());
  EXPECT_EQ(packed->words[1] & kCommandLapMask, 0u);
  ExpectEqual(Unpack(*packed), kLargest);
}

TEST(Command, signal_ignores_its_length) {
  for (const uint64_t length : {uint64_t{0}, uint64_t{7}, uint64_t{1} << 60}) {
    for (const Op op : {Op::kSignal, Op::kQuiet, Op::kBarrier}) {
      const auto packed = TryPack(Command{.op = op, .dst_rank = 3, .length_bytes = length});
      ASSERT_TRUE(packed.has_value());
      EXPECT_EQ(Unpack(*packed).length_bytes, 0u);
    }
  }
}

TEST(Command, keeps_the_low_bits_of_its_epoch) {
  const auto packed =
      TryPack(Command{.op = Op::kSignal, .channel = Channel::kPlan, .epoch = 0x123456789});
  ASSERT_TRUE(packed.has_value());
  EXPECT_EQ(Unpack(*packed).epoch, 9u);
}

TEST(Command, that_does_not_fit_is_refused_and_never_cut) {
  const auto refused = [](auto change) {
    Command command = kLargest;
    change(command);
    return !TryPack(command).has_value();
  };
  EXPECT_FALSE(refused([](Command&) {}));
  EXPECT_TRUE(refused([](Command& c) { c.dst_rank = 1024; }));
  EXPECT_TRUE(refused([](Command& c) { c.length_bytes += 16; }));
  EXPECT_TRUE(refused([](Command& c) { c.length_bytes = 0; }));
  EXPECT_TRUE(refused([](Command& c) { c.length_bytes = 24; }));
  EXPECT_TRUE(refused([](Command& c) { c.local_offset += 16; }));
  EXPECT_TRUE(refused([](Command& c) { c.local_offset = 8; }));
  EXPECT_TRUE(refused([](Command& c) { c.remote_offset += 16; }));
  EXPECT_TRUE(refused([](Command& c) { c.remote_offset = 1; }));
  EXPECT_TRUE(refused([](Command& c) { c.channel = static_cast<Channel>(kNumChannels); }));
  EXPECT_TRUE(refused([](Command& c) { c.op = static_cast<Op>(kNumOps); }));
  EXPECT_TRUE(refused([](Command& c) { c.value = 4096; }));
}

TEST(Command, random_ones_round_trip) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 200'000; ++i) {
    Command command;
    command.op = static_cast<Op>(random() % kNumOps);
    command.dst_rank = static_cast<uint32_t>(random() % 1024);
    command.length_bytes = IsWrite(command.op) ? (1 + random() % (1 << 20)) * 16 : 0;
    command.local_offset = (random() >> 28) * 16;
    command.remote_offset = (random() >> 28) * 16;
    command.channel = static_cast<Channel>(random() % kNumChannels);
    command.epoch = random() % 16;
    command.value = static_cast<uint32_t>(random() % 4096);
    const auto packed = TryPack(command);
    ASSERT_TRUE(packed.has_value());
    ExpectEqual(Unpack(*packed), command);
  }
}

TEST(Command, any_bits_decode_and_encode_to_the_same_or_are_refused) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 200'000; ++i) {
    PackedCommand bits{{random(), random() & ~kCommandLapMask}};
    const Command command = Unpack(bits);
    const auto packed = TryPack(command);
    const bool is_known = static_cast<uint32_t>(command.op) < kNumOps &&
                          static_cast<uint32_t>(command.channel) < kNumChannels;
    ASSERT_EQ(packed.has_value(), is_known);
    if (!is_known) continue;
    // Only the ignored length of a non-write may differ.
    const uint64_t length_mask = BitMask(kCommandLengthBits) << kCommandLengthShift;
    const uint64_t mask = IsWrite(command.op) ? ~uint64_t{0} : ~length_mask;
    EXPECT_EQ(packed->words[0], bits.words[0]);
    EXPECT_EQ(packed->words[1] & mask, bits.words[1] & mask);
  }
}

TEST(Command, EachChannelHasANameOfItsOwn) {
  std::set<std::string_view> names;
  const auto last = static_cast<uint32_t>(kLastChannel);
  for (uint32_t channel = 0; channel <= last; ++channel) {
    names.insert(ChannelName(static_cast<Channel>(channel)));
  }
  EXPECT_EQ(names.size(), last + 1);
  EXPECT_FALSE(names.contains(ChannelName(static_cast<Channel>(kNumChannels - 1))));
}

}  // namespace
}  // namespace jax_ep
