// Several ranks in each process, with one proxy or one each: who writes to whom is counted, while
// nothing happens and when a process, or the way to one of its ranks, dies.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>

#include "proxy/transport/registry.h"
#include "tests/proxy/proxy_world.h"
#include "tests/proxy/watched_transport.h"

namespace jax_ep {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Processes of `num_local` ranks, each a node. The parameter: whether each rank has a proxy.
class Heartbeats : public testing::TestWithParam<bool> {
 protected:
  void Start(uint32_t num_processes, uint32_t num_local, milliseconds peer_timeout) {
    num_local_ = num_local;
    WorldOptions options;
    options.num_ranks = num_processes * num_local;
    options.node_size = num_local;
    options.ranks_per_process = num_local;
    options.splits_processes = GetParam();
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

  FailureLatch& LatchOf(uint32_t process) { return world_->failure(process * num_local_); }

  // Every pair that was written over leads from the first rank of one process to the first of
  // another.
  void ExpectOnlyLeadsUsed() {
    for (const auto& [pair, num_writes] : wire_->pairs()) {
      EXPECT_EQ(pair.first % num_local_, 0u) << pair.first << " to " << pair.second;
      EXPECT_EQ(pair.second % num_local_, 0u) << pair.first << " to " << pair.second;
    }
    EXPECT_EQ(wire_->pairs().size(), world_->num_processes() * (world_->num_processes() - 1));
  }

  std::string AwaitFailure(uint32_t process) {
    const Deadline deadline = Deadline::After(ProxyWorld::kTimeout);
    while (!LatchOf(process).failed() && !deadline.expired()) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    return LatchOf(process).status().message();
  }

  static Command Signal(uint32_t to, uint64_t epoch) {
    return Command{.op = Op::kSignal, .dst_rank = to, .channel = Channel::kPlan, .epoch = epoch};
  }

  std::shared_ptr<Wire> wire_ = std::make_shared<Wire>();
  uint32_t num_local_ = 1;
  std::unique_ptr<ProxyWorld> world_;
};

TEST_P(Heartbeats, are_one_for_each_two_processes_and_nothing_else_is_written) {
  constexpr milliseconds kPeerTimeout{800};
  const auto begin = steady_clock::now();
  Start(/*num_processes=*/2, /*num_local=*/8, kPeerTimeout);
  std::this_thread::sleep_for(2 * kPeerTimeout);
  for (uint32_t process = 0; process < 2; ++process) {
    EXPECT_FALSE(LatchOf(process).failed()) << LatchOf(process).status().message();
  }
  ExpectOnlyLeadsUsed();
  const Wire::Pairs pairs = wire_->pairs();
  const auto num_ticks = 16 * (steady_clock::now() - begin) / kPeerTimeout;
  for (const auto& [pair, num_writes] : pairs) {
    EXPECT_LE(num_writes, static_cast<uint64_t>(num_ticks) + 2);  // the first, and rounding
  }
  EXPECT_NE(world_->proxy(0).DumpState().find("heartbeats sent "), std::string::npos);
  world_->Stop();
}

TEST_P(Heartbeats, barriers_and_goodbyes_go_between_leads_only) {
  constexpr milliseconds kPeerTimeout{800};
  Start(4, 3, kPeerTimeout);
  for (int i = 0; i < 20; ++i) world_->Barrier();
  world_->StopProcess(0);
  std::this_thread::sleep_for(3 * kPeerTimeout);
  for (uint32_t process = 1; process < 4; ++process) {
    EXPECT_FALSE(LatchOf(process).failed()) << LatchOf(process).status().message();
  }
  world_->Stop();
  for (uint32_t process = 0; process < 4; ++process) {
    EXPECT_FALSE(LatchOf(process).failed()) << LatchOf(process).status().message();
  }
  ExpectOnlyLeadsUsed();
}

// Each row was acknowledged, perhaps to another rank than the one that says goodbye.
TEST_P(Heartbeats, a_goodbye_follows_all_that_any_rank_of_the_process_sent) {
  Start(2, 4, milliseconds(5000));
  constexpr uint64_t kNumSignals = 100;
  for (uint64_t epoch = 1; epoch <= kNumSignals; ++epoch) {
    for (uint32_t rank = 0; rank < 4; ++rank) {
      for (uint32_t peer = 4; peer < 8; ++peer) world_->Push(rank, Signal(peer, epoch));
    }
  }
  world_->StopProcess(0);
  for (uint32_t peer = 4; peer < 8; ++peer) {
    for (uint32_t rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(world_->flag(peer, Channel::kPlan, rank)->load(), kNumSignals);
    }
  }
  world_->Stop();
  EXPECT_FALSE(LatchOf(1).failed()) << LatchOf(1).status().message();
}

// Whoever has nothing to send any more takes what comes until all of its process have come as far.
TEST_P(Heartbeats, no_goodbye_is_said_while_a_rank_of_the_process_still_sends) {
  Start(2, 4, milliseconds(5000));
  wire_->Hold(1);
  world_->Push(1, Signal(5, 1));
  std::thread stop([this] { world_->StopProcess(0); });
  std::this_thread::sleep_for(milliseconds(100));
  world_->Push(4, Signal(0, 1));
  world_->AwaitFlag(0, Channel::kPlan, 4, 1);
  world_->Push(4, Command{.op = Op::kQuiet, .epoch = 1});
  world_->AwaitQuiet(4, 1);  // acknowledged
  wire_->Release();
  stop.join();
  EXPECT_EQ(world_->flag(5, Channel::kPlan, 1)->load(), 1u);
  world_->Stop();
  EXPECT_FALSE(LatchOf(1).failed()) << LatchOf(1).status().message();
}

TEST_P(Heartbeats, a_dead_process_is_named_by_all_others_in_time) {
  constexpr milliseconds kPeerTimeout{1000};
  for (const bool is_busy : {false, true}) {
    wire_ = std::make_shared<Wire>();
    Start(4, 3, kPeerTimeout);
    world_->Barrier();
    for (uint32_t rank = 6; rank < 9; ++rank) wire_->Cut(rank);  // process 2
    if (is_busy) {
      for (uint32_t rank = 0; rank < 6; ++rank) world_->Push(rank, Signal(8, 1));
    }
    const auto begin = steady_clock::now();
    for (const uint32_t process : {0u, 1u, 3u}) {
      const std::string message = AwaitFailure(process);
      const int64_t blamed = LatchOf(process).blamed_rank();
      EXPECT_TRUE(blamed >= 6 && blamed < 9) << message;
      EXPECT_NE(message.find("rank " + std::to_string(blamed)), std::string::npos) << message;
    }
    EXPECT_LT(steady_clock::now() - begin, 3 * kPeerTimeout);
    world_->Stop();
  }
}

// The cable of one rank is out; its process is heard over another's. Nobody minds until somebody
// sends to it: then the sender names it, and everybody else hears of it.
TEST_P(Heartbeats, a_rank_that_is_cut_off_alone_is_named_by_who_sends_to_it) {
  constexpr milliseconds kPeerTimeout{800};
  Start(3, 3, kPeerTimeout);
  world_->Barrier();
  wire_->Cut(5);  // of process 1, which rank 3 leads
  std::this_thread::sleep_for(2 * kPeerTimeout);
  for (uint32_t process = 0; process < 3; ++process) {
    ASSERT_FALSE(LatchOf(process).failed()) << LatchOf(process).status().message();
  }
  world_->Push(7, Signal(5, 1));
  const auto begin = steady_clock::now();
  const std::string message = AwaitFailure(2);
  EXPECT_LT(steady_clock::now() - begin, 2 * kPeerTimeout);
  EXPECT_NE(message.find("rank 5 stopped answering: no acknowledgement for"), std::string::npos)
      << message;
  for (const uint32_t process : {0u, 1u}) {
    EXPECT_NE(AwaitFailure(process).find("reported a failure of rank 5"), std::string::npos);
    EXPECT_EQ(LatchOf(process).blamed_rank(), 5);
  }
  world_->Stop();
}

TEST_P(Heartbeats, a_failure_reaches_every_process_though_none_has_used_a_pair) {
  Start(4, 4, milliseconds(30'000));
  world_->failure(0).Set(Unavailable("the monitor saw that rank 2 died"), /*blamed=*/2);
  world_->proxy(0).Kick();
  for (uint32_t process = 1; process < 4; ++process) {
    EXPECT_NE(AwaitFailure(process).find("reported a failure of rank 2"), std::string::npos);
    EXPECT_EQ(LatchOf(process).blamed_rank(), 2);
  }
  world_->Stop();
  ExpectOnlyLeadsUsed();
}

INSTANTIATE_TEST_SUITE_P(Processes, Heartbeats, testing::Bool(), [](const auto& info) {
  return info.param ? "a_proxy_for_each_rank" : "one_proxy";
});

}  // namespace
}  // namespace jax_ep
