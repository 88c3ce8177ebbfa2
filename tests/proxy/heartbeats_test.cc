// Several ranks in each proxy: who writes to whom is counted, while nothing happens and when a
// proxy, or the way to one of its ranks, dies.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "proxy/transport/registry.h"
#include "tests/proxy/forwarding_transport.h"
#include "tests/proxy/proxy_world.h"

namespace jax_ep {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// What all endpoints of a world write, and which of them are cut off. Thread rule: any.
class Wire {
 public:
  using Pairs = std::map<std::pair<uint32_t, uint32_t>, uint64_t>;  // (rank, peer) -> writes

  void Count(uint32_t rank, uint32_t peer) {
    std::lock_guard lock(mutex_);
    ++pairs_[{rank, peer}];
  }
  Pairs pairs() {
    std::lock_guard lock(mutex_);
    return pairs_;
  }
  // From now on nothing leaves or reaches it.
  void Cut(uint32_t rank) {
    std::lock_guard lock(mutex_);
    cut_.insert(rank);
  }
  bool IsCut(uint32_t rank) {
    std::lock_guard lock(mutex_);
    return cut_.contains(rank);
  }

 private:
  std::mutex mutex_;
  Pairs pairs_;
  std::set<uint32_t> cut_;
};

class WatchedTransport : public ForwardingTransport {
 public:
  // `peers`: ranks in the order in which they will be connected.
  WatchedTransport(std::unique_ptr<Transport> inner, uint32_t rank, std::vector<uint32_t> peers,
                   std::shared_ptr<Wire> wire)
      : ForwardingTransport(std::move(inner)),
        rank_(rank),
        peers_(std::move(peers)),
        wire_(std::move(wire)) {}

  Status PostWrite(const WriteRequest& request) override {
    wire_->Count(rank_, peers_[request.peer]);
    if (wire_->IsCut(rank_)) return Status::Ok();
    return ForwardingTransport::PostWrite(request);
  }
  Result<size_t> Poll(std::span<TransportEvent> events) override {
    if (wire_->IsCut(rank_)) return size_t{0};
    return ForwardingTransport::Poll(events);
  }

 private:
  const uint32_t rank_;
  const std::vector<uint32_t> peers_;
  const std::shared_ptr<Wire> wire_;
};

// Proxies of `num_local` ranks, each a node.
class Heartbeats : public testing::Test {
 protected:
  void Start(uint32_t num_proxies, uint32_t num_local, milliseconds peer_timeout) {
    num_local_ = num_local;
    WorldOptions options;
    options.num_ranks = num_proxies * num_local;
    options.node_size = num_local;
    options.ranks_per_proxy = num_local;
    options.proxy.peer_timeout = peer_timeout;
    options.proxy.transport_factory =
        [this, num_local, num_ranks = options.num_ranks](
            const TransportOptions& made) -> Result<std::unique_ptr<Transport>> {
      Result<std::unique_ptr<Transport>> inner = MakeTransport("loopback", made);
      if (!inner.ok()) return inner;
      std::vector<uint32_t> peers;
      for (uint32_t peer = 0; peer < num_ranks; ++peer) {
        if (peer / num_local != made.rank / num_local) peers.push_back(peer);
      }
      return std::unique_ptr<Transport>(
          std::make_unique<WatchedTransport>(std::move(*inner), made.rank, peers, wire_));
    };
    world_ = std::make_unique<ProxyWorld>(options);
    world_->Start();
  }

  uint32_t ProxyOf(uint32_t rank) const { return rank / num_local_; }
  uint32_t NumProxies() const { return world_->num_ranks() / num_local_; }
  FailureLatch& LatchOf(uint32_t proxy) { return world_->failure(proxy * num_local_); }

  // Every pair that was written over leads from the first rank of one proxy to the first of
  // another.
  void ExpectOnlyLeadsUsed() {
    for (const auto& [pair, num_writes] : wire_->pairs()) {
      EXPECT_EQ(pair.first % num_local_, 0u) << pair.first << " to " << pair.second;
      EXPECT_EQ(pair.second % num_local_, 0u) << pair.first << " to " << pair.second;
    }
    EXPECT_EQ(wire_->pairs().size(), NumProxies() * (NumProxies() - 1));
  }

  std::string AwaitFailure(uint32_t proxy) {
    const Deadline deadline = Deadline::After(ProxyWorld::kTimeout);
    while (!LatchOf(proxy).failed() && !deadline.expired()) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    return LatchOf(proxy).status().message();
  }

  static Command Signal(uint32_t to, uint64_t epoch) {
    return Command{.op = Op::kSignal, .dst_rank = to, .channel = Channel::kPlan, .epoch = epoch};
  }

  std::shared_ptr<Wire> wire_ = std::make_shared<Wire>();
  uint32_t num_local_ = 1;
  std::unique_ptr<ProxyWorld> world_;
};

TEST_F(Heartbeats, are_one_for_each_two_proxies_and_nothing_else_is_written) {
  constexpr milliseconds kPeerTimeout{800};
  constexpr int kTicks = 32;  // in two of those
  Start(/*num_proxies=*/2, /*num_local=*/8, kPeerTimeout);
  std::this_thread::sleep_for(2 * kPeerTimeout);
  for (uint32_t proxy = 0; proxy < 2; ++proxy) {
    EXPECT_FALSE(LatchOf(proxy).failed()) << LatchOf(proxy).status().message();
  }
  ExpectOnlyLeadsUsed();
  for (const auto& [pair, num_writes] : wire_->pairs()) EXPECT_LE(num_writes, kTicks + 2u);
  EXPECT_NE(world_->proxy(0).DumpState().find("heartbeats sent "), std::string::npos);
  world_->Stop();
}

TEST_F(Heartbeats, barriers_and_goodbyes_go_between_leads_only) {
  constexpr milliseconds kPeerTimeout{300};
  Start(4, 3, kPeerTimeout);
  for (int i = 0; i < 20; ++i) world_->Barrier();
  world_->proxy(0).Stop();
  std::this_thread::sleep_for(3 * kPeerTimeout);
  for (uint32_t proxy = 1; proxy < 4; ++proxy) {
    EXPECT_FALSE(LatchOf(proxy).failed()) << LatchOf(proxy).status().message();
  }
  world_->Stop();
  for (uint32_t proxy = 0; proxy < 4; ++proxy) {
    EXPECT_FALSE(LatchOf(proxy).failed()) << LatchOf(proxy).status().message();
  }
  ExpectOnlyLeadsUsed();
}

// Each row was acknowledged, perhaps to another rank than the one that says goodbye.
TEST_F(Heartbeats, a_goodbye_follows_all_that_any_rank_of_the_proxy_sent) {
  Start(2, 4, milliseconds(5000));
  constexpr uint64_t kNumSignals = 100;
  for (uint64_t epoch = 1; epoch <= kNumSignals; ++epoch) {
    for (uint32_t rank = 0; rank < 4; ++rank) {
      for (uint32_t peer = 4; peer < 8; ++peer) world_->Push(rank, Signal(peer, epoch));
    }
  }
  world_->proxy(0).Stop();
  for (uint32_t peer = 4; peer < 8; ++peer) {
    for (uint32_t rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(world_->flag(peer, Channel::kPlan, rank)->load(), kNumSignals);
    }
  }
  world_->Stop();
  EXPECT_FALSE(LatchOf(1).failed()) << LatchOf(1).status().message();
}

TEST_F(Heartbeats, a_dead_proxy_is_named_by_all_others_in_time) {
  constexpr milliseconds kPeerTimeout{1000};
  for (const bool is_busy : {false, true}) {
    wire_ = std::make_shared<Wire>();
    Start(4, 3, kPeerTimeout);
    world_->Barrier();
    for (uint32_t rank = 6; rank < 9; ++rank) wire_->Cut(rank);  // proxy 2
    if (is_busy) {
      for (uint32_t rank = 0; rank < 6; ++rank) world_->Push(rank, Signal(8, 1));
    }
    const auto begin = steady_clock::now();
    for (const uint32_t proxy : {0u, 1u, 3u}) {
      const std::string message = AwaitFailure(proxy);
      const int64_t blamed = LatchOf(proxy).blamed_rank();
      EXPECT_TRUE(blamed >= 6 && blamed < 9) << message;
      EXPECT_NE(message.find("rank " + std::to_string(blamed)), std::string::npos) << message;
    }
    EXPECT_LT(steady_clock::now() - begin, 3 * kPeerTimeout);
    world_->Stop();
  }
}

// The cable of one rank is out; its proxy is heard over another's. Nobody minds until somebody
// sends to it: then the sender names it, and everybody else hears of it.
TEST_F(Heartbeats, a_rank_that_is_cut_off_alone_is_named_by_who_sends_to_it) {
  constexpr milliseconds kPeerTimeout{800};
  Start(3, 3, kPeerTimeout);
  world_->Barrier();
  wire_->Cut(5);  // of proxy 1, which rank 3 leads
  std::this_thread::sleep_for(2 * kPeerTimeout);
  for (uint32_t proxy = 0; proxy < 3; ++proxy) {
    ASSERT_FALSE(LatchOf(proxy).failed()) << LatchOf(proxy).status().message();
  }
  world_->Push(7, Signal(5, 1));
  const auto begin = steady_clock::now();
  const std::string message = AwaitFailure(2);
  EXPECT_LT(steady_clock::now() - begin, 2 * kPeerTimeout);
  EXPECT_NE(message.find("rank 5 stopped answering: no acknowledgement for"), std::string::npos)
      << message;
  for (const uint32_t proxy : {0u, 1u}) {
    EXPECT_NE(AwaitFailure(proxy).find("reported a failure of rank 5"), std::string::npos);
    EXPECT_EQ(LatchOf(proxy).blamed_rank(), 5);
  }
  world_->Stop();
}

TEST_F(Heartbeats, a_failure_reaches_every_proxy_though_none_has_used_a_pair) {
  Start(4, 4, milliseconds(30'000));
  world_->failure(0).Set(Unavailable("the monitor saw that rank 2 died"), /*blamed=*/2);
  world_->proxy(0).Kick();
  for (uint32_t proxy = 1; proxy < 4; ++proxy) {
    EXPECT_NE(AwaitFailure(proxy).find("reported a failure of rank 2"), std::string::npos);
    EXPECT_EQ(LatchOf(proxy).blamed_rank(), 2);
  }
  world_->Stop();
  ExpectOnlyLeadsUsed();
}

}  // namespace
}  // namespace jax_ep
