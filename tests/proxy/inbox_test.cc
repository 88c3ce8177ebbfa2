// The inbox of the memory-copying transports, including senders that die half-way.
#include "proxy/transport/inbox.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace jax_ep {
namespace {

struct alignas(64) Line {
  std::byte bytes[64];
};

class InboxTest : public testing::Test {
 protected:
  Inbox Make(uint32_t num_slots) {
    memory_.assign(InboxBytes(num_slots) / sizeof(Line) + 1, Line{});
    return Inbox::Create(bytes(), num_slots);
  }
  std::span<std::byte> bytes() {
    return {reinterpret_cast<std::byte*>(memory_.data()), memory_.size() * sizeof(Line)};
  }
  std::vector<Line> memory_;
};

TEST_F(InboxTest, zero_passes_and_a_full_inbox_refuses) {
  Inbox inbox = Make(2);
  for (int lap = 0; lap < 10; ++lap) {
    EXPECT_FALSE(inbox.TryPop().has_value());
    EXPECT_TRUE(inbox.TryPush(0));
    EXPECT_TRUE(inbox.TryPush(UINT32_MAX));
    EXPECT_FALSE(inbox.HasRoom());
    EXPECT_FALSE(inbox.TryPush(1));
    EXPECT_EQ(inbox.TryPop(), 0u);
    EXPECT_TRUE(inbox.HasRoom());
    EXPECT_EQ(inbox.TryPop(), UINT32_MAX);
  }
}

TEST_F(InboxTest, of_impossible_size_is_not_opened) {
  Make(4);
  EXPECT_TRUE(Inbox::Open(bytes()).has_value());
  EXPECT_FALSE(Inbox::Open(bytes().first(sizeof(InboxHeader))).has_value());
  auto* header = reinterpret_cast<InboxHeader*>(bytes().data());
  for (const uint64_t bad : {uint64_t{0}, uint64_t{3}, uint64_t{1} << 20, uint64_t{1} << 63}) {
    header->num_slots = bad;
    EXPECT_FALSE(Inbox::Open(bytes()).has_value());
  }
}

// A sender that is killed after it filled a slot and before it moved head: later senders and the
// receiver must both get past it.
TEST_F(InboxTest, a_sender_that_died_before_moving_head_blocks_nobody) {
  Inbox inbox = Make(4);
  auto* header = reinterpret_cast<InboxHeader*>(bytes().data());
  EXPECT_TRUE(inbox.TryPush(1));
  header->head.store(0);  // as if the sender had died there
  EXPECT_TRUE(inbox.TryPush(2));
  EXPECT_EQ(inbox.TryPop(), 1u);
  EXPECT_EQ(inbox.TryPop(), 2u);
  EXPECT_TRUE(inbox.TryPush(3));
  header->head.store(2);
  EXPECT_EQ(inbox.TryPop(), 3u);
  EXPECT_FALSE(inbox.TryPop().has_value());
  for (uint32_t i = 0; i < 4; ++i) EXPECT_TRUE(inbox.TryPush(i));
  EXPECT_FALSE(inbox.TryPush(9));
}

TEST_F(InboxTest, many_senders_lose_nothing_and_keep_their_own_order) {
  constexpr uint32_t kSenders = 4;
  constexpr uint32_t kEach = 20'000;
  Inbox inbox = Make(16);
  std::vector<uint32_t> payloads(kSenders * kEach);
  std::vector<std::jthread> senders;
  for (uint32_t sender = 0; sender < kSenders; ++sender) {
    senders.emplace_back([&, sender] {
      Inbox mine = *Inbox::Open(bytes());
      for (uint32_t i = 0; i < kEach; ++i) {
        payloads[sender * kEach + i] = i + 1;
        while (!mine.TryPush(sender * kEach + i)) std::this_thread::yield();
      }
    });
  }
  std::vector<uint32_t> next(kSenders);
  for (uint32_t taken = 0; taken < kSenders * kEach;) {
    const std::optional<uint32_t> value = inbox.TryPop();
    if (!value) {
      std::this_thread::yield();
      continue;
    }
    ++taken;
    ASSERT_EQ(*value % kEach, next[*value / kEach]++);
    ASSERT_EQ(payloads[*value], *value % kEach + 1);
  }
  EXPECT_FALSE(inbox.TryPop().has_value());
}

}  // namespace
}  // namespace jax_ep
