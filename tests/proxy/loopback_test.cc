#include "tests/proxy/transport_conformance.h"

namespace jax_ep {
namespace {

INSTANTIATE_TEST_SUITE_P(Loopback, TransportConformance,
                         testing::Values(TransportParams{"plain", "loopback", ""}),
                         TransportParamsName);

TEST(Registry, makes_what_it_lists_as_available) {
  const FakeCopies::Mapped nothing;
  FakeCopies copies(&nothing, /*seed=*/0, /*delay=*/0);
  for (const TransportInfo& info : ListTransports()) {
    const Result<std::unique_ptr<Transport>> made =
        MakeTransport(info.name, TransportOptions{.copies = &copies});
    EXPECT_EQ(made.ok(), info.is_available) << info.name;
    EXPECT_FALSE(info.reason.empty());
    if (!info.is_available) {  // not built, or no such device here
      EXPECT_TRUE(made.status().code() == StatusCode::kUnimplemented ||
                  made.status().code() == StatusCode::kUnavailable)
          << made.status().message();
    }
  }
}

TEST(Registry, names_the_known_transports_when_asked_for_an_unknown_one) {
  const Result<std::unique_ptr<Transport>> made = MakeTransport("pigeon", TransportOptions{});
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(made.status().message().find("pigeon"), std::string::npos);
  EXPECT_NE(made.status().message().find("loopback, shm"), std::string::npos);
}

TEST(Loopback, a_closed_peer_is_unavailable) {
  auto a = MakeTransport("loopback", TransportOptions{});
  auto b = MakeTransport("loopback", TransportOptions{});
  ASSERT_TRUE(a.ok() && b.ok());
  const std::string address = (*b)->LocalAddress();
  const Result<uint32_t> peer = (*a)->Connect(address, Deadline::After(std::chrono::seconds(1)));
  ASSERT_TRUE(peer.ok());
  b->reset();
  EXPECT_EQ((*a)->PostWrite(WriteRequest{.peer = *peer, .has_immediate = true}).code(),
            StatusCode::kUnavailable);
  EXPECT_EQ((*a)->Connect(address, Deadline::After(std::chrono::seconds(1))).status().code(),
            StatusCode::kUnavailable);
}

}  // namespace
}  // namespace jax_ep
