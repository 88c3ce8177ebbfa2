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

}  // namespace
}  // namespace jax_ep
