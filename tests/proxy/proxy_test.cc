// The proxy over well-behaved transports: bytes and flags arrive, quiet and barrier mean what they
// say, misuse is an error.
#include "proxy/proxy.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/proxy/proxy_world.h"

namespace jax_ep {
namespace {

class ProxyOverTransport : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(All, ProxyOverTransport, testing::Values("loopback", "shm"),
                         [](const auto& info) { return std::string(info.param); });

WorldOptions Options(const char* transport) {
  WorldOptions options;
  options.proxy.transport = transport;
  return options;
}

TEST_P(ProxyOverTransport, an_exchange_between_two_ranks_arrives) {
  ProxyWorld world(Options(GetParam()));
  world.Start();
  Exchange(&world).Run(/*num_epochs=*/100);
  world.Barrier();
  world.Stop();
  EXPECT_FALSE(world.failure(0).failed()) << world.failure(0).status().message();
}

TEST_P(ProxyOverTransport, several_proxies_and_nodes_arrive) {
  WorldOptions options = Options(GetParam());
  options.num_ranks = 8;
  options.node_size = 2;
  options.ranks_per_process = 2;
  ProxyWorld world(options);
  world.Start();
  Exchange(&world).Run(/*num_epochs=*/40);
  world.Barrier();
  world.Barrier();
  world.Stop();
  for (uint32_t rank = 0; rank < 8; ++rank) {
    EXPECT_FALSE(world.failure(rank).failed()) << world.failure(rank).status().message();
  }
}

// Whoever sees a flag finds the stamp of its arrival: arrows of a trace go forward in time.
TEST_P(ProxyOverTransport, an_arrival_is_in_the_trace_before_its_flag_is_seen) {
  WorldOptions options = Options(GetParam());
  for (uint32_t rank = 0; rank < options.num_ranks; ++rank) {
    options.traces.push_back(std::make_shared<TraceTrack>(rank, "proxy"));
  }
  ProxyWorld world(options);
  world.Start();
  std::atomic<uint64_t>* flag = world.flag(1, Channel::kDispatch, 0);
  uint64_t newest = 0;
  for (uint64_t epoch = 1; epoch <= 5'000; ++epoch) {
    world.Push(0,
               {.op = Op::kSignal, .dst_rank = 1, .channel = Channel::kDispatch, .epoch = epoch});
    const Deadline deadline = Deadline::After(ProxyWorld::kTimeout);
    while (flag->load(std::memory_order_acquire) < epoch) {
      ASSERT_FALSE(deadline.expired()) << world.proxy(1).DumpState();
    }
    options.traces[1]->Read([&](const TraceEvent* events, uint64_t count) {
      for (uint64_t i = 0; i < count; ++i) {
        if (events[i].kind == TraceKind::kFlag) newest = events[i].value;
      }
    });
    ASSERT_EQ(newest, epoch);
  }
  world.Stop();
}

}  // namespace
}  // namespace jax_ep
