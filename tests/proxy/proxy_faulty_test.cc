// The protocol over networks that reorder, repeat, delay, split, refuse and show bytes late: the
// same bytes and flags as over loopback, for every seed.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "proxy/abi/imm.h"
#include "tests/proxy/proxy_world.h"

namespace jax_ep {
namespace {

constexpr uint64_t kNumSeeds = JAX_EP_PROXY_TEST_SEEDS;
constexpr uint64_t kNumShards = 10;  // so that ctest output shows where a failure was

// What the network does, and the shape of the group, from one number.
struct Scenario {
  std::string faulty_spec;
  WorldOptions world;
};

Scenario MakeScenario(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&random](uint64_t limit) { return random() % limit; };
  const auto sometimes = [&](uint64_t limit) { return below(2) == 0 ? 0 : below(limit); };
  Scenario scenario;
  WorldOptions& world = scenario.world;
  const uint64_t reorder = sometimes(33);
  const uint64_t delay = sometimes(9);
  const uint64_t duplicate = sometimes(31);
  const uint64_t split = sometimes(41);
  const uint64_t again = sometimes(21);
  const uint64_t slow = sometimes(9);
  const uint64_t late = below(4) == 0 ? 1 : 0;
  const uint64_t max_message = below(3) == 0 ? 64 << below(2) : 0;
  scenario.faulty_spec =
      "seed=" + std::to_string(seed) + ",reorder=" + std::to_string(reorder) +
      ",per_flow=" + std::to_string(below(2)) + ",delay=" + std::to_string(delay) +
      ",duplicate=" + std::to_string(duplicate) + ",split=" + std::to_string(split) +
      ",again=" + std::to_string(again) + ",slow_completions=" + std::to_string(slow) +
      ",payload_late=" + std::to_string(late) + ",max_message=" + std::to_string(max_message);
  world.proxy.transport = below(4) == 0 ? "shm" : "loopback";
  world.num_ranks = below(4) == 0 ? 4 : 2;
  world.node_size = world.num_ranks == 4 && below(2) == 0 ? 2 : 1;
  world.ranks_per_process = below(4) == 0 ? 1 : 4;
  world.ll_slots = Exchange::kLlSlots;
  world.data_bytes = 32 << 10;
  constexpr uint32_t kWindows[] = {1, 2, 3, 8, 256, 4096};
  world.proxy.window_messages = kWindows[below(6)];
  world.proxy.window_bytes = below(3) == 0 ? 512 : 1 << 20;
  world.proxy.inbox_slots = below(3) == 0 ? 4 : 256;
  world.ring_slots = below(2) == 0 ? 2 : 64;
  world.proxy.faulty_spec = scenario.faulty_spec;
  // Eight days of decoding; flags count in 64 bits.
  constexpr uint64_t kFirstEpochs[] = {0, (uint64_t{1} << 31) - 3, (uint64_t{1} << 32) - 3,
                                       (uint64_t{1} << 40) - 3};
  world.first_epoch = kFirstEpochs[below(4)];
  world.splits_processes = below(2) == 0;
  return scenario;
}

class ProxyOverFaultyNetwork : public testing::TestWithParam<uint64_t> {};

INSTANTIATE_TEST_SUITE_P(Seeds, ProxyOverFaultyNetwork, testing::Range<uint64_t>(0, kNumShards));

TEST_P(ProxyOverFaultyNetwork, delivers_the_same_bytes_and_flags_as_a_good_one) {
  constexpr uint64_t kPerShard = kNumSeeds / kNumShards;
  for (uint64_t i = 0; i < kPerShard; ++i) {
    const uint64_t seed = GetParam() * kPerShard + i;
    const Scenario scenario = MakeScenario(seed);
    SCOPED_TRACE("scenario " + std::to_string(seed) + ": " + scenario.faulty_spec);
    ProxyWorld world(scenario.world);
    world.Start();
    ASSERT_FALSE(HasFatalFailure());
    Exchange(&world).Run(/*num_epochs=*/5);
    ASSERT_FALSE(HasFatalFailure());
    world.Barrier();
    ASSERT_FALSE(HasFatalFailure());
    world.Stop();
    for (uint32_t rank = 0; rank < world.num_ranks(); ++rank) {
      ASSERT_FALSE(world.failure(rank).failed()) << world.failure(rank).status().message();
    }
  }
}

// Enough epochs for the 4 epoch bits to wrap several times, and with split writes enough messages
// for many laps of small windows.
TEST(ProxyOverFaultyNetwork, survives_wraps_of_the_epoch) {
  WorldOptions options;
  options.ll_slots = Exchange::kLlSlots;
  options.proxy.window_messages = 5;
  options.proxy.faulty_spec = "seed=5,reorder=12,duplicate=20,split=20,delay=3,max_message=64";
  ProxyWorld world(options);
  world.Start();
  Exchange(&world).Run(/*num_epochs=*/100);
  world.Barrier();
  world.Stop();
  EXPECT_FALSE(world.failure(0).failed()) << world.failure(0).status().message();
  uint64_t num_reorders = 0;
  uint64_t num_duplicates = 0;
  for (const FlowStats& flow : world.proxy(0).Stats()) {
    num_reorders += flow.reorders;
    num_duplicates += flow.duplicates;
  }
  EXPECT_GT(num_reorders, 0u);
  EXPECT_GT(num_duplicates, 0u);
}

TEST(ProxyOverFaultyNetwork, sequences_wrap_many_times) {
  WorldOptions options;
  options.proxy.window_messages = 64;
  options.proxy.faulty_spec = "seed=6,reorder=30,duplicate=10";
  options.ring_slots = 1024;
  ProxyWorld world(options);
  world.Start();
  constexpr uint64_t kNumSignals = 3 * kSequenceSpace;
  for (uint64_t epoch = 1; epoch <= kNumSignals; ++epoch) {
    world.Push(
        0, Command{.op = Op::kSignal, .dst_rank = 1, .channel = Channel::kPlan, .epoch = epoch});
  }
  world.AwaitFlag(1, Channel::kPlan, 0, kNumSignals);
  world.Barrier();
  world.Stop();
  EXPECT_EQ(world.flag(1, Channel::kPlan, 0)->load(), kNumSignals);
}

TEST(ProxyOverFaultyNetwork, two_groups_at_once_do_not_mix) {
  WorldOptions first;
  first.ll_slots = Exchange::kLlSlots;
  first.proxy.faulty_spec = "seed=1,reorder=8,duplicate=10";
  WorldOptions second = first;
  second.proxy.group_name = "other";
  second.proxy.faulty_spec = "seed=2,reorder=8,delay=3";
  ProxyWorld a(first);
  ProxyWorld b(second);
  a.Start();
  b.Start();
  for (uint64_t part = 0; part < 2; ++part) {
    if (part == 0) Exchange(&a).Run(20);
    if (part == 1) Exchange(&b).Run(20);
  }
  a.Barrier();
  b.Barrier();
  a.Stop();
  b.Barrier();  // the other group lives on
  b.Stop();
  EXPECT_FALSE(a.failure(0).failed());
  EXPECT_FALSE(b.failure(0).failed());
}

}  // namespace
}  // namespace jax_ep
