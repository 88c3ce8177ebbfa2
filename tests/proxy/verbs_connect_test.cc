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

#include "proxy/base/blob.h"
#include "proxy/base/descriptor.h"
#include "proxy/transport/side_channel.h"
#include "proxy/transport/side_socket.h"
#include "tests/proxy/fake_verbs.h"

namespace jax_ep {
namespace {

constexpr std::chrono::seconds kTimeout{10};
constexpr uint64_t kAddressMagic = 0x3142524556504541;  // verbs_transport.cc

class VerbsConnections : public testing::Test {
 protected:
  FakeVerbs verbs;
  std::unique_ptr<Transport> transport = verbs.Make(/*rank=*/7, /*num_qps=*/2);

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
    return BlobWriter().U64(kAddressMagic).U64(3).Text(side).Take();
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
  const auto used = verbs.Make(/*rank=*/1, /*num_qps=*/2);
  const auto unused = verbs.Make(/*rank=*/2, /*num_qps=*/2);
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

TEST_F(VerbsConnections, to_a_peer_with_other_settings_say_which) {
  const auto other = verbs.Make(/*rank=*/1, /*num_qps=*/1);
  const uint32_t peer = Connect(other->LocalAddress());
  for (int i = 0; i < 2; ++i) {
    const Status refused = WriteUntilAnswered(peer);
    EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument) << refused.message();
    EXPECT_NE(refused.message().find("JAX_EP_VERBS_QPS"), std::string::npos) << refused.message();
  }
}

// The peer is not to blame for what this rank's NIC does not have.
TEST_F(VerbsConnections, that_the_device_has_no_queue_pair_for_are_no_loss_of_the_peer) {
  const auto other = verbs.Make(/*rank=*/1, /*num_qps=*/2);
  const uint32_t peer = Connect(other->LocalAddress());
  verbs.AnswerQueuePairs(ENOMEM);
  const Status failed = WriteUntilAnswered(peer);
  EXPECT_EQ(failed.code(), StatusCode::kInternal) << failed.message();
  EXPECT_NE(failed.message().find("fake0:1: ibv_create_qp"), std::string::npos) << failed.message();
}

}  // namespace
}  // namespace jax_ep
