#include "tests/proxy/transport_conformance.h"

namespace jax_ep {
namespace {

INSTANTIATE_TEST_SUITE_P(Shm, TransportConformance,
                         testing::Values(TransportParams{"plain", "shm", ""}), TransportParamsName);

TEST(Shm, a_heap_that_is_not_shareable_is_refused_with_a_hint) {
  auto transport = MakeTransport("shm", TransportOptions{});
  ASSERT_TRUE(transport.ok());
  std::byte bytes[64];
  const Result<LocalRegion> region = (*transport)->Register(MemoryRegion{.bytes = bytes});
  ASSERT_FALSE(region.ok());
  EXPECT_NE(region.status().message().find("shareable"), std::string::npos);
}

TEST(Shm, a_closed_peer_is_unavailable) {
  auto a = MakeTransport("shm", TransportOptions{});
  auto b = MakeTransport("shm", TransportOptions{});
  ASSERT_TRUE(a.ok() && b.ok());
  const Result<uint32_t> peer =
      (*a)->Connect((*b)->LocalAddress(), Deadline::After(std::chrono::seconds(1)));
  ASSERT_TRUE(peer.ok());
  b->reset();
  EXPECT_EQ((*a)->PostWrite(WriteRequest{.peer = *peer, .has_immediate = true}).code(),
            StatusCode::kUnavailable);
}

}  // namespace
}  // namespace jax_ep
