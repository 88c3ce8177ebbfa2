#include "tests/proxy/transport_conformance.h"

namespace jax_ep {
namespace {

INSTANTIATE_TEST_SUITE_P(Shm, TransportConformance,
                         testing::Values(TransportParams{"plain", "shm", ""}), TransportParamsName);

TEST(Shm, rings_the_exported_bell) {
  Result<SharedMemory> bell = SharedMemory::Create(sizeof(Doorbell), /*shareable=*/true);
  ASSERT_TRUE(bell.ok());
  auto* doorbell = reinterpret_cast<Doorbell*>(bell->bytes().data());
  auto sender = MakeTransport("shm", TransportOptions{});
  auto receiver =
      MakeTransport("shm", TransportOptions{.bell = doorbell, .bell_export = bell->Export()});
  ASSERT_TRUE(sender.ok() && receiver.ok());
  const Result<uint32_t> peer =
      (*sender)->Connect((*receiver)->LocalAddress(), Deadline::After(std::chrono::seconds(1)));
  ASSERT_TRUE(peer.ok()) << peer.status().message();
  EXPECT_TRUE((*sender)->PostWrite(WriteRequest{.peer = *peer, .has_immediate = true}).ok());
  EXPECT_EQ(doorbell->count.load(std::memory_order_acquire), 1u);
}

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
