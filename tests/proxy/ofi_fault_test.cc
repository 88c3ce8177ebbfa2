// ofi over a libfabric that fails on demand.
#include <errno.h>
#include <gtest/gtest.h>
#include <rdma/fi_errno.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <memory>

#include "tests/proxy/fake_fabric.h"

namespace {
bool has_random = true;
}

// A kernel, or a sandbox, that gives no random bytes.
extern "C" ssize_t getrandom(void* bytes, size_t num_bytes, unsigned flags) {
  if (has_random) return syscall(SYS_getrandom, bytes, num_bytes, flags);
  errno = ENOSYS;
  return -1;
}

namespace jax_ep {
namespace {

class OfiFaults : public testing::Test {
 protected:
  OfiFaults()
      : transport(fabric.Make({.rank = 3, .team = {.index = 1, .num_teams = 2}})),
        peer(*transport->Connect(transport->LocalAddress(), Deadline::After({}))) {}

  Status Post(uint64_t token) {
    return transport->PostWrite(
        {.peer = peer, .has_immediate = true, .immediate = 7, .token = token});
  }

  FakeFabric fabric;
  std::unique_ptr<Transport> transport;
  uint32_t peer;
  TransportEvent events[4];
};

TEST_F(OfiFaults, a_receive_that_failed_is_posted_again) {
  ASSERT_EQ(fabric.num_receives(), kFabricReceives);
  fabric.FailReceive();
  fabric.FailReceive();
  EXPECT_EQ(fabric.num_receives(), kFabricReceives - 2);
  const Result<size_t> count = transport->Poll(events);
  ASSERT_TRUE(count.ok()) << count.status().message();
  EXPECT_EQ(*count, 0u);
  EXPECT_EQ(fabric.num_receives(), kFabricReceives);
}

TEST_F(OfiFaults, a_receive_that_is_refused_is_posted_later) {
  fabric.RefuseReceives(true);
  fabric.FailReceive();
  ASSERT_TRUE(transport->Poll(events).ok());
  EXPECT_EQ(fabric.num_receives(), kFabricReceives - 1);
  fabric.RefuseReceives(false);
  ASSERT_TRUE(transport->Poll(events).ok());
  EXPECT_EQ(fabric.num_receives(), kFabricReceives);
}

// Small writes were injected: their errors named no peer, and were only counted.
TEST_F(OfiFaults, a_small_write_to_a_lost_peer_is_told_by_the_next_with_its_name) {
  ASSERT_TRUE(Post(9).ok());
  fabric.FailWrite(FI_ECONNRESET);
  const Result<size_t> count = transport->Poll(events);
  ASSERT_TRUE(count.ok()) << count.status().message();
  ASSERT_EQ(*count, 1u);
  EXPECT_EQ(events[0].kind, TransportEvent::Kind::kSent);
  EXPECT_EQ(events[0].token, 9u);
  const Status next = Post(10);
  EXPECT_EQ(next.code(), StatusCode::kUnavailable);
  EXPECT_NE(next.message().find("rank 3 of team 1 cannot be reached"), std::string::npos)
      << next.message();
}

TEST_F(OfiFaults, a_small_write_that_is_refused_is_an_error_with_the_peers_name) {
  ASSERT_TRUE(Post(9).ok());
  fabric.FailWrite(FI_EINVAL);
  const Status refused = transport->Poll(events).status();
  EXPECT_EQ(refused.code(), StatusCode::kInternal);
  EXPECT_NE(refused.message().find("writing to rank 3 of team 1"), std::string::npos)
      << refused.message();
}

// The key is what keeps strangers out of the memory.
TEST_F(OfiFaults, no_memory_is_registered_under_a_key_that_can_be_guessed) {
  std::byte memory[64] = {};
  ASSERT_TRUE(transport->Register({.bytes = memory}).ok());
  has_random = false;
  const Status refused = transport->Register({.bytes = memory}).status();
  has_random = true;
  EXPECT_EQ(refused.code(), StatusCode::kInternal);
  EXPECT_EQ(refused.message(), "ofi: getrandom: Function not implemented");
}

}  // namespace
}  // namespace jax_ep
