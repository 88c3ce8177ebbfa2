// Queue pairs of verbs are made when they are first written through, and nobody waits for them.
// Over a libibverbs that is this test's; the side channel is real.
#include <arpa/inet.h>
#include <errno.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "proxy/base/blob.h"
#include "proxy/base/descriptor.h"
#include "proxy/transport/side_channel.h"
#include "proxy/transport/side_socket.h"
#include "tests/proxy/fake_verbs.h"

namespace jax_ep {
namespace {

constexpr std::chrono::seconds kTimeout{10};
constexpr uint32_t kQps = 2;
constexpr uint64_t kAddressMagic = 0x3142524556504541;  // verbs_transport.cc

class VerbsConnections : public testing::Test {
 protected:
  FakeVerbs verbs;
  std::unique_ptr<Transport> transport = verbs.Make(/*rank=*/7, kQps);

  uint32_t Connect(const std::string& address) {
    const Result<uint32_t> peer = transport->Connect(address, Deadline::After(kTimeout));
    EXPECT_TRUE(peer.ok()) << peer.status().message();
    return *peer;
  }
  Status Write(uint32_t peer) {
    return transport->PostWrite({.peer = peer, .has_immediate = true, .immediate = 1});
  }
  // The first answer to a write that is not "poll and try again".
  Status WriteUntilAnswered(uint32_t peer) {
    const Deadline deadline = Deadline::After(kTimeout);
    Status status = Write(peer);
    while (status.code() == StatusCode::kResourceExhausted && !deadline.expired()) {
      std::this_thread::yield();
      status = Write(peer);
    }
    return status;
  }
  std::string State() const {
    std::string text;
    transport->AppendState(&text);
    return text;
  }
  // Of a rank whose side channel is at `port` of this host.
  static std::string AddressAt(uint16_t port) {
    const std::string side = BlobWriter()
                                 .U64(kSideBlobMagic)
                                 .Text("127.0.0.1")
                                 .U64(port)
                                 .Text(std::string(kSideTokenBytes, 't'))
                                 .Take();
    return BlobWriter().U64(kAddressMagic).U64(3).U64(1).U64(kQps).Text(side).Take();
  }
};

// A socket that takes connections and says nothing.
class Silent {
 public:
  Silent() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(name);
    EXPECT_EQ(bind(socket_.fd(), reinterpret_cast<sockaddr*>(&name), size), 0);
    EXPECT_EQ(listen(socket_.fd(), 8), 0);
    EXPECT_EQ(getsockname(socket_.fd(), reinterpret_cast<sockaddr*>(&name), &size), 0);
    port_ = ntohs(name.sin_port);
  }
  uint16_t port() const { return port_; }

 private:
  Descriptor socket_;
  uint16_t port_ = 0;
};

TEST_F(VerbsConnections, are_made_for_peers_that_are_written_to) {
  const auto used = verbs.Make(/*rank=*/1, kQps);
  const auto unused = verbs.Make(/*rank=*/2, kQps);
  const uint32_t first = Connect(used->LocalAddress());
  Connect(unused->LocalAddress());
  EXPECT_EQ(verbs.num_qps(), 0u);
  EXPECT_NE(State().find("to 0 peers"), std::string::npos) << State();
  const Status sent = WriteUntilAnswered(first);
  ASSERT_TRUE(sent.ok()) << sent.message();
  EXPECT_EQ(verbs.num_qps(), 4u);  // two of ours, and two at the peer
  ASSERT_TRUE(Write(first).ok());
  EXPECT_EQ(verbs.num_qps(), 4u);
  EXPECT_NE(State().find("to 1 peers"), std::string::npos) << State();
}

TEST_F(VerbsConnections, to_a_peer_that_is_silent_keep_neither_writes_nor_the_end_waiting) {
  const Silent silent;
  const uint32_t peer = Connect(AddressAt(silent.port()));
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 100; ++i) EXPECT_EQ(Write(peer).code(), StatusCode::kResourceExhausted);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the handshake is under way
  EXPECT_EQ(Write(peer).code(), StatusCode::kResourceExhausted);
  transport.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(3));
}

TEST_F(VerbsConnections, to_a_peer_that_is_gone_fail_with_its_name) {
  uint16_t port = 0;
  {
    const Silent gone;
    port = gone.port();
  }
  const uint32_t peer = Connect(AddressAt(port));
  for (int i = 0; i < 2; ++i) {
    const Status refused = WriteUntilAnswered(peer);
    EXPECT_EQ(refused.code(), StatusCode::kUnavailable) << refused.message();
    EXPECT_NE(refused.message().find("connecting to rank 3"), std::string::npos)
        << refused.message();
  }
}

TEST_F(VerbsConnections, to_a_peer_that_is_silent_hold_up_no_other) {
  const Silent silent;
  const uint32_t first = Connect(AddressAt(silent.port()));
  EXPECT_EQ(Write(first).code(), StatusCode::kResourceExhausted);
  const auto other = verbs.Make(/*rank=*/1, kQps);
  const Status sent = WriteUntilAnswered(Connect(other->LocalAddress()));
  EXPECT_TRUE(sent.ok()) << sent.message();
  EXPECT_EQ(Write(first).code(), StatusCode::kResourceExhausted);
}

// Said when the group is made, and of every peer.
TEST_F(VerbsConnections, to_a_peer_with_other_settings_are_refused_at_once_and_say_which) {
  const auto other = verbs.Make(/*rank=*/1, /*num_qps=*/1);
  const auto refused = transport->Connect(other->LocalAddress(), Deadline::After(kTimeout));
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.status().message().find("rank 1 has 1 rails of 1 queue pairs, this one 1 of 2"),
            std::string::npos)
      << refused.status().message();
  EXPECT_NE(refused.status().message().find("JAX_EP_VERBS_DEVICE"), std::string::npos);
}

TEST_F(VerbsConnections, many_at_a_time_all_come_about) {
  std::vector<std::unique_ptr<Transport>> others;
  std::vector<uint32_t> peers;
  for (uint32_t rank = 8; rank < 48; ++rank) {
    others.push_back(verbs.Make(rank, kQps));
    peers.push_back(Connect(others.back()->LocalAddress()));
  }
  for (const uint32_t peer : peers) {
    const Status asked = Write(peer);
    EXPECT_TRUE(asked.ok() || asked.code() == StatusCode::kResourceExhausted) << asked.message();
  }
  for (const uint32_t peer : peers) {
    const Status sent = WriteUntilAnswered(peer);
    EXPECT_TRUE(sent.ok()) << sent.message();
  }
  EXPECT_EQ(verbs.num_qps(), 2 * kQps * peers.size());
}

// The peer is not to blame for what this rank's NIC does not have.
TEST_F(VerbsConnections, that_the_device_has_no_queue_pair_for_are_no_loss_of_the_peer) {
  const auto other = verbs.Make(/*rank=*/1, kQps);
  const uint32_t peer = Connect(other->LocalAddress());
  verbs.AnswerQueuePairs(ENOMEM);
  const Status failed = WriteUntilAnswered(peer);
  EXPECT_EQ(failed.code(), StatusCode::kInternal) << failed.message();
  EXPECT_NE(failed.message().find("fake0:1: ibv_create_qp"), std::string::npos) << failed.message();
}

}  // namespace
}  // namespace jax_ep
