// The agreed order with real executors on one heap per rank; calls are stand-ins that record when
// they ran and may wait for each other, as kernels do.
#include "xla_ffi/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "proxy/base/shared_memory.h"
#include "tests/proxy/no_memory.h"

namespace jax_ep {
namespace {

constexpr std::chrono::seconds kTimeout{20};

// N ranks of one node in this process.
class Team {
 public:
  explicit Team(uint32_t num_ranks, std::chrono::nanoseconds timeout = kTimeout) {
    GroupShape shape{.num_ranks = num_ranks, .node_size = num_ranks, .num_experts = num_ranks};
    const HeapLayout layout = HeapLayout::Make(shape);
    for (uint32_t r = 0; r < num_ranks; ++r) {
      auto heap = SharedMemory::Create(layout.total_bytes, /*shareable=*/false);
      EXPECT_TRUE(heap.ok());
      heaps_.push_back(std::move(*heap));
    }
    for (uint32_t r = 0; r < num_ranks; ++r) {
      auto rank = std::make_unique<Rank>();
      rank->group_name = "test";
      rank->shape = shape;
      rank->layout = layout;
      rank->rank = r;
      for (SharedMemory& heap : heaps_) rank->heaps.push_back(heap.bytes().data());
      rank->in_process.assign(num_ranks, true);
      rank->failure = &failure;
      rank->timeout = timeout;
      auto order = std::make_unique<AgreedOrder>(*rank);
      auto executor = Executor::Create(std::move(rank), std::move(order), watch.get());
      EXPECT_TRUE(executor.ok()) << executor.status().message();
      executors.push_back(std::move(*executor));
    }
  }
  ~Team() { Stop(); }
  void Stop() {
    for (auto& executor : executors) executor->Stop(FailedPrecondition("closed"));
  }

  FailureLatch failure;
  std::unique_ptr<ContinuationWatch> watch = std::move(*ContinuationWatch::Create());
  std::vector<SharedMemory> heaps_;
  std::vector<std::unique_ptr<Executor>> executors;
};

void WaitFor(const std::atomic<int>& count, int expected) {
  const Deadline deadline = Deadline::After(kTimeout);
  while (count.load() < expected) {
    ASSERT_FALSE(deadline.expired()) << count.load() << " of " << expected;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST(Executor, every_rank_follows_one_order) {
  constexpr uint32_t kRanks = 4;
  constexpr uint64_t kCalls = 200;
  Team team(kRanks);
  std::vector<std::vector<uint64_t>> ran(kRanks);
  std::atomic<int> completed{0};
  std::vector<std::thread> handlers;
  for (uint32_t r = 0; r < kRanks; ++r) {
    handlers.emplace_back([&, r] {
      std::vector<uint64_t> sites(kCalls);
      for (uint64_t i = 0; i < kCalls; ++i) sites[i] = i;
      std::shuffle(sites.begin(), sites.end(), std::mt19937(r));
      for (const uint64_t site : sites) {
        team.executors[r]->Enqueue(Call{.key = {.run_id = 7, .site = site},
                                        .operation = "test",
                                        .run =
                                            [&ran, r, site](Rank&) {
                                              ran[r].push_back(site);
                                              return Status::Ok();
                                            },
                                        .complete =
                                            [&completed](Status status) {
                                              EXPECT_TRUE(status.ok()) << status.message();
                                              completed.fetch_add(1);
                                            }});
      }
    });
  }
  for (auto& handler : handlers) handler.join();
  WaitFor(completed, static_cast<int>(kRanks * kCalls));
  team.Stop();
  for (uint32_t r = 1; r < kRanks; ++r) EXPECT_EQ(ran[r], ran[0]) << "rank " << r;
}

TEST(Executor, equal_keys_run_in_arrival_order) {
  Team team(2);
  std::atomic<int> completed{0};
  std::vector<int> ran;
  for (uint32_t r = 0; r < 2; ++r) {
    for (int i = 0; i < 10; ++i) {
      team.executors[r]->Enqueue(Call{.key = {.run_id = 1, .site = 3},
                                      .operation = "loop",
                                      .run =
                                          [&ran, r, i](Rank&) {
                                            if (r == 1) ran.push_back(i);
                                            return Status::Ok();
                                          },
                                      .complete = [&](Status) { completed.fetch_add(1); }});
    }
  }
  WaitFor(completed, 20);
  team.Stop();
  EXPECT_EQ(ran, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST(Executor, a_blocking_continuation_does_not_stop_the_next_call) {
  // The old failure: with one thread for calls and continuations, a continuation that waits in a
  // native collective for another call of the same rank never returns.
  Team team(1);
  std::atomic<int> second{0}, completed{0};
  team.executors[0]->Enqueue(Call{.key = {.run_id = 1, .site = 1},
                                  .operation = "first",
                                  .run = [](Rank&) { return Status::Ok(); },
                                  .complete =
                                      [&](Status) {
                                        WaitFor(second, 1);
                                        completed.fetch_add(1);
                                      }});
  team.executors[0]->Enqueue(Call{.key = {.run_id = 1, .site = 2},
                                  .operation = "second",
                                  .run =
                                      [&](Rank&) {
                                        second.store(1);
                                        return Status::Ok();
                                      },
                                  .complete = [&](Status) { completed.fetch_add(1); }});
  WaitFor(completed, 2);
}

TEST(Executor, a_failure_ends_queued_and_later_calls_with_the_first_cause) {
  Team team(2);
  std::atomic<int> completed{0};
  const auto expect_cause = [&](Status status) {
    EXPECT_EQ(status.message(), "rank 1 is gone");
    completed.fetch_add(1);
  };
  // A call that waits for its peers, as kernels do: until the latch is set.
  team.executors[1]->Enqueue(Call{.key = {.run_id = 1, .site = 1},
                                  .operation = "test",
                                  .run =
                                      [&](Rank&) {
                                        while (!team.failure.failed()) std::this_thread::yield();
                                        return team.failure.status();
                                      },
                                  .complete = expect_cause});
  team.failure.Set(Unavailable("rank 1 is gone"));
  team.failure.Set(Unavailable("a later cause"));
  WaitFor(completed, 1);
  team.executors[0]->Enqueue(Call{.key = {.run_id = 1, .site = 1},
                                  .operation = "test",
                                  .run = [](Rank&) { return Status::Ok(); },
                                  .complete = expect_cause});
  WaitFor(completed, 2);
}

// An exception on an executor's thread ended the process.
TEST(Executor, a_call_that_throws_fails_the_group) {
  Team team(2);
  std::atomic<int> completed{0};
  team.executors[1]->Enqueue(Call{.key = {.run_id = 1, .site = 1},
                                  .operation = "test",
                                  .run = [](Rank&) -> Status { throw std::bad_alloc(); },
                                  .complete =
                                      [&](Status status) {
                                        EXPECT_EQ(status.code(), StatusCode::kInternal);
                                        completed.fetch_add(1);
                                      }});
  WaitFor(completed, 1);
  const std::string message = team.failure.status().message();
  EXPECT_NE(message.find("the executor of rank 1 met an exception"), std::string::npos) << message;
}

TEST(Executor, a_call_that_never_comes_to_its_turn_is_overdue_after_the_timeout) {
  Team team(2, /*timeout=*/std::chrono::milliseconds(300));
  std::atomic<int> completed{0};
  // Rank 0 puts site 1 in front, which rank 1 never gets; rank 1 waits with site 2.
  std::atomic<int> ran{0};
  team.executors[0]->Enqueue(Call{.key = {.run_id = 1, .site = 1},
                                  .operation = "plan",
                                  .run =
                                      [&](Rank&) {
                                        ran.fetch_add(1);
                                        return Status::Ok();
                                      },
                                  .complete = [](Status) {}});
  WaitFor(ran, 1);
  team.executors[1]->Enqueue(
      Call{.key = {.run_id = 1, .site = 2},
           .operation = "dispatch",
           .run = [](Rank&) { return Status::Ok(); },
           .complete =
               [&](Status status) {
                 EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
                 EXPECT_NE(status.message().find("dispatch on rank 1"), std::string::npos)
                     << status.message();
                 EXPECT_NE(status.message().find("has not reached this rank"), std::string::npos)
                     << status.message();
                 completed.fetch_add(1);
               }});
  WaitFor(completed, 1);
}

// Its own text ended the process.
TEST(Executor, that_has_no_memory_to_say_what_is_overdue_fails_the_group) {
  Team team(2, /*timeout=*/std::chrono::milliseconds(300));
  std::atomic<int> ran{0};
  const auto call = [&ran](uint64_t site, int num_failing) {
    return Call{.key = {.run_id = 1, .site = site},
                .operation = "dispatch",
                .run =
                    [&ran, num_failing](Rank&) {
                      num_failing_allocations = num_failing;
                      ran.fetch_add(1);
                      return Status::Ok();
                    },
                .complete = [](Status) {}};
  };
  team.executors[0]->Enqueue(call(1, 0));
  team.executors[0]->Enqueue(call(2, 0));
  WaitFor(ran, 2);
  team.executors[1]->Enqueue(call(1, 1));
  WaitFor(ran, 3);
  std::atomic<int> completed{0};
  Call overdue = call(3, 0);
  overdue.complete = [&](Status status) {
    EXPECT_NE(status.message().find("the executor of rank 1 met an exception"), std::string::npos)
        << status.message();
    completed.fetch_add(1);
  };
  team.executors[1]->Enqueue(std::move(overdue));
  WaitFor(completed, 1);
}

TEST(Executor, calls_after_stop_complete_with_the_reason) {
  Team team(1);
  team.Stop();
  std::atomic<int> completed{0};
  team.executors[0]->Enqueue(Call{.key = {},
                                  .operation = "late",
                                  .run = [](Rank&) { return Status::Ok(); },
                                  .complete =
                                      [&](Status status) {
                                        EXPECT_EQ(status.message(), "closed");
                                        completed.fetch_add(1);
                                      }});
  EXPECT_EQ(completed.load(), 1);
}

}  // namespace
}  // namespace jax_ep
