// The command ring, both ends. Also run under ThreadSanitizer.
#include "proxy/command_ring.h"

#include <gtest/gtest.h>

#include <array>
#include <span>
#include <thread>
#include <vector>

namespace jax_ep {
namespace {

std::unique_ptr<CommandRing> MakeRing(uint32_t num_slots) {
  Result<std::unique_ptr<CommandRing>> ring = CommandRing::Create(num_slots);
  EXPECT_TRUE(ring.ok());
  return std::move(ring.value());
}

TEST(CommandRing, refuses_sizes_that_are_no_power_of_two) {
  for (const uint32_t size : {0u, 1u, 3u, 100u}) EXPECT_FALSE(CommandRing::Create(size).ok());
}

TEST(CommandRing, an_empty_ring_pops_nothing) {
  auto ring = MakeRing(4);
  PackedCommand out[4];
  EXPECT_EQ(ring->PopBatch(out), 0u);
}

TEST(CommandRing, a_full_ring_makes_the_producer_wait) {
  auto ring = MakeRing(4);
  const RingView view = ring->view();
  for (uint64_t i = 0; i < 4; ++i) EXPECT_TRUE(view.TryPush(PackedCommand{{i, i}}));
  EXPECT_FALSE(view.TryPush(PackedCommand{{9, 9}}));
  PackedCommand out[1];
  ASSERT_EQ(ring->PopBatch(out), 1u);
  EXPECT_EQ(out[0].words[0], 0u);
  EXPECT_TRUE(view.TryPush(PackedCommand{{4, 4}}));
  EXPECT_FALSE(view.TryPush(PackedCommand{{9, 9}}));
}

// Under a protocol where a zero word means "not written yet" a command of zeros would never be seen
// and the ring would stall on its slot. The lap bit tells a fresh slot, in every lap.
TEST(CommandRing, commands_of_zeros_pass_in_every_lap) {
  auto ring = MakeRing(2);
  const RingView view = ring->view();
  PackedCommand out[2];
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(view.TryPush(PackedCommand{{0, 0}}));
    ASSERT_EQ(ring->PopBatch(out), 1u);
    EXPECT_EQ(out[0].words[0], 0u);
    EXPECT_EQ(out[0].words[1], 0u);
    EXPECT_EQ(ring->PopBatch(out), 0u);
  }
}

// A GPU's ring: its producers count elsewhere, so only the slots say what waits.
TEST(CommandRing, lives_in_memory_of_the_caller_and_ignores_its_head) {
  alignas(RingMemory) std::array<std::byte, CommandRing::BytesFor(4)> memory;
  EXPECT_FALSE(CommandRing::Create(4, std::span(memory).first(64)).ok());
  EXPECT_FALSE(CommandRing::Create(2, std::span(memory).subspan(8)).ok());
  auto ring = std::move(CommandRing::Create(4, memory).value());
  auto* shared = reinterpret_cast<RingMemory*>(memory.data());
  PackedCommand out[4];
  for (uint64_t i = 0; i < 12; ++i) {
    EXPECT_EQ(ring->num_queued(), 0u);
    RingSlot& slot = shared->slots()[i % 4];
    slot.payload.store(i, std::memory_order_relaxed);
    slot.commit.store(shared->LapBit(i), std::memory_order_release);
    EXPECT_EQ(ring->num_queued(), 1u);
    ASSERT_EQ(ring->PopBatch(out), 1u);
    EXPECT_EQ(out[0].words[0], i);
  }
  EXPECT_EQ(ring->num_popped(), 12u);
}

TEST(CommandRing, keeps_order_and_content_over_many_laps) {
  auto ring = MakeRing(8);
  const RingView view = ring->view();
  uint64_t pushed = 0;
  uint64_t popped = 0;
  PackedCommand out[5];
  while (popped < 10'000) {
    for (uint64_t i = 0; i < 1 + pushed % 7; ++i) {
      if (view.TryPush(PackedCommand{{pushed * 3, pushed}})) ++pushed;
    }
    const size_t count = ring->PopBatch(std::span(out).first(1 + popped % 5));
    for (size_t i = 0; i < count; ++i, ++popped) {
      ASSERT_EQ(out[i].words[0], popped * 3);
      ASSERT_EQ(out[i].words[1], popped);
    }
  }
  EXPECT_EQ(ring->num_popped() + ring->num_queued(), pushed);
  EXPECT_EQ(ring->num_popped(), popped);
}

TEST(CommandRing, many_producers_lose_and_tear_nothing_and_keep_their_own_order) {
  constexpr uint64_t kProducers = 4;
  constexpr uint64_t kEach = 20'000;
  auto ring = MakeRing(64);
  std::vector<uint64_t> payloads(kProducers * kEach);  // plain memory published by the push
  std::vector<std::jthread> producers;
  for (uint64_t producer = 0; producer < kProducers; ++producer) {
    producers.emplace_back([&, producer] {
      const RingView view = ring->view();
      for (uint64_t i = 0; i < kEach; ++i) {
        const uint64_t id = producer * kEach + i;
        payloads[id] = id + 1;
        while (!view.TryPush(PackedCommand{{id, ~id & ~kCommandLapMask}})) {
          std::this_thread::yield();
        }
      }
    });
  }
  std::vector<uint64_t> next(kProducers);
  PackedCommand out[16];
  for (uint64_t popped = 0; popped < kProducers * kEach;) {
    const size_t count = ring->PopBatch(out);
    if (count == 0) std::this_thread::yield();
    for (size_t i = 0; i < count; ++i, ++popped) {
      const uint64_t id = out[i].words[0];
      ASSERT_EQ(out[i].words[1], ~id & ~kCommandLapMask);
      ASSERT_EQ(payloads[id], id + 1);
      ASSERT_EQ(id % kEach, next[id / kEach]++);
    }
  }
  EXPECT_EQ(ring->PopBatch(out), 0u);
}

}  // namespace
}  // namespace jax_ep
