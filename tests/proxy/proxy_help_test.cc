// Threads that do the proxy's rounds while they wait for it: messages move on their threads, nobody
// depends on their help, and what fails there is reported as if the proxy thread had met it.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "proxy/base/proxy_port.h"
#include "proxy/proxy.h"
#include "proxy/transport/registry.h"
#include "tests/proxy/gate_transport.h"
#include "tests/proxy/no_memory.h"
#include "tests/proxy/proxy_world.h"

namespace jax_ep {
namespace {

using std::chrono::milliseconds;

// Sees the thread of each post.
class WitnessTransport : public GateTransport {
 public:
  struct Seen {
    const std::thread::id main = std::this_thread::get_id();
    std::atomic<uint64_t> num_posts_of_main{0};
    std::atomic<bool> break_posts_of_main{false};
    std::atomic<bool> throw_in_posts_of_main{false};
  };

  WitnessTransport(std::unique_ptr<Transport> inner, std::shared_ptr<Seen> seen)
      : GateTransport(std::move(inner), std::make_shared<Gate>()), seen_(std::move(seen)) {}

  Status PostWrite(const WriteRequest& request) override {
    if (std::this_thread::get_id() == seen_->main && request.length_bytes > 0) {
      ++seen_->num_posts_of_main;
      if (seen_->throw_in_posts_of_main) {
        num_failing_allocations = INT_MAX;
        throw std::bad_alloc();
      }
      if (seen_->break_posts_of_main) return Internal("the cable is on fire");
    }
    return GateTransport::PostWrite(request);
  }

 private:
  std::shared_ptr<Seen> seen_;
};

// Two proxies over loopback. With `faulty_spec` nobody is woken cheaply, as on a network.
WorldOptions Witnessed(std::shared_ptr<WitnessTransport::Seen> seen, const char* faulty_spec) {
  WorldOptions options;
  options.ranks_per_process = 1;
  options.proxy.transport_factory =
      [seen,
       faulty_spec](TransportOptions transport_options) -> Result<std::unique_ptr<Transport>> {
    transport_options.faulty_spec = faulty_spec;
    Result<std::unique_ptr<Transport>> inner = MakeTransport("loopback", transport_options);
    if (!inner.ok()) return inner;
    return std::unique_ptr<Transport>(std::make_unique<WitnessTransport>(std::move(*inner), seen));
  };
  return options;
}

constexpr const char* kNoFaults = "seed=1";

Command Write(uint64_t epoch) {
  return Command{.op = Op::kWriteSignal,
                 .dst_rank = 1,
                 .length_bytes = 16,
                 .channel = Channel::kDispatch,
                 .epoch = epoch};
}

// Until `is_done`, at most kTimeout, writes from rank 0 and waits for each at rank 1.
template <typename IsDone>
uint64_t WriteUntil(ProxyWorld& world, IsDone&& is_done) {
  const Deadline deadline = Deadline::After(ProxyWorld::kTimeout);
  uint64_t epoch = 0;
  while (!is_done() && !deadline.expired()) {
    world.Push(0, Write(++epoch));
    if (world.failure(0).failed()) break;
    world.AwaitFlag(1, Channel::kDispatch, 0, epoch);
    // Long enough that the proxy threads sleep, as between two calls of a model.
    std::this_thread::sleep_for(milliseconds(2));
  }
  return epoch;
}

TEST(Help, posts_on_the_thread_that_pushes_while_the_proxy_sleeps) {
  const auto seen = std::make_shared<WitnessTransport::Seen>();
  ProxyWorld world(Witnessed(seen, kNoFaults));
  world.Start();
  ASSERT_TRUE(world.proxy(0).wants_help());
  WriteUntil(world, [&] { return seen->num_posts_of_main >= 10; });
  EXPECT_GE(seen->num_posts_of_main, 10u);
  world.Barrier();
  world.Stop();
  EXPECT_FALSE(world.failure(0).failed()) << world.failure(0).status().message();
}

TEST(Help, is_not_wanted_where_waking_is_cheap) {
  const auto seen = std::make_shared<WitnessTransport::Seen>();
  ProxyWorld world(Witnessed(seen, ""));
  world.Start();
  EXPECT_FALSE(world.proxy(0).wants_help());
  int rounds = 0;
  WriteUntil(world, [&] { return ++rounds > 50; });
  EXPECT_EQ(seen->num_posts_of_main, 0u);
  world.Stop();
}

TEST(Help, can_be_switched_off) {
  const auto seen = std::make_shared<WitnessTransport::Seen>();
  WorldOptions options = Witnessed(seen, "seed=9,reorder=8");
  options.proxy.caller_progress = false;
  ProxyWorld world(options);
  world.Start();
  EXPECT_FALSE(world.proxy(0).wants_help());
  EXPECT_FALSE(world.proxy(0).Help());
  Exchange(&world).Run(/*num_epochs=*/50);
  world.Barrier();
  world.Stop();
  EXPECT_EQ(seen->num_posts_of_main, 0u);
  EXPECT_FALSE(world.failure(0).failed()) << world.failure(0).status().message();
}

TEST(Help, that_never_comes_holds_nobody_up) {
  const auto seen = std::make_shared<WitnessTransport::Seen>();
  ProxyWorld world(Witnessed(seen, "seed=3,reorder=8,duplicate=10"));
  world.Start();
  // Two threads that said so and then lost their cores.
  world.proxy(0).BeginHelp();
  world.proxy(1).BeginHelp();
  Exchange(&world).Run(/*num_epochs=*/50);
  world.Barrier();
  world.proxy(0).EndHelp(/*leaves_work=*/true);
  world.proxy(1).EndHelp(/*leaves_work=*/false);
  world.Barrier();
  world.Stop();
  EXPECT_FALSE(world.failure(0).failed()) << world.failure(0).status().message();
}

TEST(Help, of_many_threads_at_once_keeps_every_message) {
  const auto seen = std::make_shared<WitnessTransport::Seen>();
  ProxyWorld world(Witnessed(seen, "seed=5,reorder=8"));
  world.Start();
  std::atomic<bool> stop{false};
  std::vector<std::jthread> helpers;
  for (uint32_t i = 0; i < 4; ++i) {
    helpers.emplace_back([&world, &stop, i] {
      while (!stop) (void)HelpUntil(world.proxy(i % 2), [&stop] { return stop.load(); });
    });
  }
  Exchange(&world).Run(/*num_epochs=*/100);
  world.Barrier();
  stop = true;
  helpers.clear();
  world.Stop();
  EXPECT_FALSE(world.failure(0).failed()) << world.failure(0).status().message();
}

TEST(Help, that_meets_an_error_latches_it) {
  const auto seen = std::make_shared<WitnessTransport::Seen>();
  ProxyWorld world(Witnessed(seen, kNoFaults));
  world.Start();
  seen->break_posts_of_main = true;
  const Deadline deadline = Deadline::After(ProxyWorld::kTimeout);
  for (uint64_t epoch = 1; !world.failure(0).failed() && !deadline.expired(); ++epoch) {
    world.Push(0, Write(epoch));
    std::this_thread::sleep_for(milliseconds(2));
  }
  const std::string message = world.failure(0).status().message();
  EXPECT_NE(message.find("the cable is on fire"), std::string::npos) << message;
  EXPECT_NE(message.find("rank 0"), std::string::npos) << message;
  EXPECT_FALSE(world.proxy(0).Help());  // harmless afterwards
  world.proxy(0).Kick();
  world.Stop();
}

// Saying so took memory, too, and ended the process.
TEST(Help, that_runs_out_of_memory_latches_it) {
  const auto seen = std::make_shared<WitnessTransport::Seen>();
  ProxyWorld world(Witnessed(seen, kNoFaults));
  world.Start();
  seen->throw_in_posts_of_main = true;
  const Deadline deadline = Deadline::After(ProxyWorld::kTimeout);
  for (uint64_t epoch = 1; !world.failure(0).failed() && !deadline.expired(); ++epoch) {
    world.Push(0, Write(epoch));
    num_failing_allocations = 0;
    std::this_thread::sleep_for(milliseconds(2));
  }
  const std::string message = world.failure(0).status().message();
  EXPECT_NE(message.find("out of memory"), std::string::npos) << message;
  world.Stop();
}

TEST(Help, before_the_start_and_after_the_end_does_nothing) {
  const auto seen = std::make_shared<WitnessTransport::Seen>();
  ProxyWorld world(Witnessed(seen, kNoFaults));
  world.Start();
  world.Stop();
  world.proxy(0).BeginHelp();
  EXPECT_FALSE(world.proxy(0).Help());
  world.proxy(0).EndHelp(/*leaves_work=*/false);
  world.Push(0, Write(1));
  EXPECT_EQ(seen->num_posts_of_main, 0u);
}

}  // namespace
}  // namespace jax_ep
