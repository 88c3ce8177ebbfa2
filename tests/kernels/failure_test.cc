// Every wait ends, and says who was waited for; misuse is an error and no stray write.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "tests/kernels/exchange.h"
#include "tests/kernels/team.h"

namespace jax_ep::testing {
namespace {

// Arrays of a plan of T tokens, all pairs to expert 0.
struct PlanArrays {
  PlanArrays(const GroupShape& shape, int64_t num_tokens, Mode mode = Mode::kHt)
      : topk_idx(static_cast<size_t>(num_tokens * shape.top_k), 0),
        group_sizes(shape.experts_per_rank()),
        group_counts(shape.experts_per_rank()),
        send_slot(topk_idx.size()),
        recv_src(static_cast<size_t>(WorstRecvRows(shape, Layout::kExpertMajor, num_tokens))),
        send_counts(shape.num_ranks),
        recv_counts(shape.num_ranks) {
    params.mode = mode;
    params.num_tokens = num_tokens;
    params.recv_rows = static_cast<int64_t>(recv_src.size());
    params.topk_idx = topk_idx;
    params.out.group_sizes = group_sizes;
    params.out.group_counts = group_counts;
    params.out.send_slot = send_slot;
    params.out.recv_src = recv_src;
    params.out.send_counts = send_counts;
    params.out.recv_counts = recv_counts;
    params.out.num_dropped = &num_dropped;
    params.out.overflow = &overflow;
  }
  PlanArrays(const PlanArrays&) = delete;

  DispatchParams Dispatch() const {
    DispatchParams dispatch;
    dispatch.mode = params.mode;
    dispatch.num_tokens = params.num_tokens;
    dispatch.recv_rows = params.recv_rows;
    dispatch.send_slot = send_slot;
    dispatch.recv_src = recv_src;
    return dispatch;
  }
  CombineParams Combine() const {
    CombineParams combine;
    combine.mode = params.mode;
    combine.num_tokens = params.num_tokens;
    combine.recv_rows = params.recv_rows;
    combine.send_slot = send_slot;
    combine.recv_src = recv_src;
    return combine;
  }

  std::vector<int32_t> topk_idx, group_sizes, group_counts, send_slot, recv_src, send_counts,
      recv_counts;
  int32_t num_dropped = 0;
  int32_t overflow = 0;
  PlanParams params;
};

TeamOptions SmallTeam(uint32_t num_ranks, uint32_t node_size) {
  TeamOptions options;
  options.shape = MakeShape(num_ranks, node_size, num_ranks, 1, 8, 4);
  options.timeout = std::chrono::milliseconds(200);
  return options;
}

TEST(Failure, AMissingRankIsNamedWithinTheTimeout) {
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    Team team(SmallTeam(3, 3));
    const auto begin = std::chrono::steady_clock::now();
    const auto statuses = team.Run([&](Rank& rank) {
      if (rank.rank == 1) return Status::Ok();  // never comes
      PlanArrays arrays(rank.shape, 4, mode);
      return RunPlan(rank, arrays.params);
    });
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    EXPECT_TRUE(team.failure().failed());
    const std::string first = team.failure().status().message();
    EXPECT_EQ(team.failure().status().code(), StatusCode::kDeadlineExceeded);
    for (const char* part : {"group test: rank", "plan epoch 1", "waiting for rank 1", "signal 1",
                             "arrived 0", "timeout_s"}) {
      EXPECT_NE(first.find(part), std::string::npos) << first << " lacks " << part;
    }
    for (const uint32_t r : {0u, 2u}) EXPECT_FALSE(statuses[r].ok());
  }
}

TEST(Failure, ALatchedFailureEndsWaitsAndLaterCalls) {
  TeamOptions options = SmallTeam(2, 2);
  options.timeout = std::chrono::seconds(600);
  Team team(options);
  const auto statuses = team.Run([&](Rank& rank) {
    if (rank.rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      team.failure().Set(Unavailable("rank 1 has gone"));
      return Status::Ok();
    }
    PlanArrays arrays(rank.shape, 4);
    const Status waited = RunPlan(rank, arrays.params);
    EXPECT_FALSE(RunDispatch(rank, arrays.Dispatch()).ok());
    EXPECT_FALSE(RunCombine(rank, arrays.Combine()).ok());
    uint64_t epoch = 0;
    EXPECT_FALSE(StartDispatch(rank, arrays.Dispatch(), &epoch).ok());
    return waited;
  });
  EXPECT_EQ(statuses[0].code(), StatusCode::kUnavailable);
  EXPECT_NE(statuses[0].message().find("rank 1 has gone"), std::string::npos);
}

TEST(Failure, InvalidIdsFailTheGroupWhereTheyAreRefused) {
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    for (const uint32_t node_size : {3u, 1u}) {
      TeamOptions options = SmallTeam(3, node_size);
      options.timeout = std::chrono::seconds(600);
      Team team(options);
      std::atomic<int> num_planned{0};
      const auto statuses = team.Run([&](Rank& rank) {
        rank.refuses_invalid_ids = true;
        PlanArrays arrays(rank.shape, 4, mode);
        JAX_EP_RETURN_IF_ERROR(RunPlan(rank, arrays.params));
        num_planned.fetch_add(1);
        if (rank.rank == 1) {
          // Its mates' first plans may end later than its own: a failure would end them, too.
          const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
          while (num_planned < 3 && std::chrono::steady_clock::now() < until) {
            std::this_thread::yield();
          }
          arrays.topk_idx[2] = static_cast<int32_t>(rank.shape.num_experts);
        }
        return RunPlan(rank, arrays.params);
      });
      EXPECT_EQ(num_planned, 3);
      const std::string first = team.failure().status().message();
      for (const char* part :
           {"group test: rank 1, ", "plan epoch 2", "got 1 expert id(s) of 3", "JAX_EP_DEBUG"}) {
        EXPECT_NE(first.find(part), std::string::npos) << first << " lacks " << part;
      }
      EXPECT_EQ(team.failure().blamed_rank(), RankOfTeam(0, 1));
      EXPECT_EQ(team.counters(1).invalid_ids, 1u);
      for (const Status& status : statuses) {  // nobody gets beyond the plan
        EXPECT_NE(status.message().find("got 1 expert id(s)"), std::string::npos)
            << status.message();
      }
    }
  }
}

// A team that goes on without rank 1, which has no heap here and does not come.
void GoOnWithoutRank1(Rank& rank) {
  rank.active = {1, 0, 1};
  rank.heaps[1] = nullptr;
  rank.in_process[1] = false;
}

TEST(Failure, NobodyWaitsForARankThatTheGroupGoesOnWithout) {
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    for (const uint32_t node_size : {3u, 1u}) {
      TeamOptions options = SmallTeam(3, node_size);
      options.timeout = std::chrono::seconds(60);
      Team team(options);
      const auto statuses = team.Run([&](Rank& rank) {
        if (rank.rank == 1) return Status::Ok();
        GoOnWithoutRank1(rank);
        PlanArrays arrays(rank.shape, 4, mode);
        arrays.topk_idx = {0, kUnreachable + 1, 2, -1};
        for (int round = 0; round < 5; ++round) {  // sets are used again
          JAX_EP_RETURN_IF_ERROR(RunPlan(rank, arrays.params));
          JAX_EP_RETURN_IF_ERROR(RunDispatch(rank, arrays.Dispatch()));
          JAX_EP_RETURN_IF_ERROR(RunCombine(rank, arrays.Combine()));
        }
        EXPECT_EQ(arrays.send_counts, (std::vector<int32_t>{1, 0, 1}));
        EXPECT_EQ(arrays.recv_counts, (std::vector<int32_t>{1, 0, 1}));
        EXPECT_EQ(arrays.num_dropped, 0);
        return Status::Ok();
      });
      for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.message();
    }
  }
}

TEST(Failure, AMaskThatIsNotTheAgreedOneIsRefused) {
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    for (const bool is_masked_too_much : {false, true}) {
      TeamOptions options = SmallTeam(3, 3);
      options.timeout = std::chrono::seconds(600);
      Team team(options);
      const auto statuses = team.Run([&](Rank& rank) {
        if (rank.rank == 1) return Status::Ok();
        GoOnWithoutRank1(rank);
        PlanArrays arrays(rank.shape, 4, mode);
        if (rank.rank == 2) arrays.topk_idx[3] = is_masked_too_much ? kUnreachable : 1;
        return RunPlan(rank, arrays.params);
      });
      const std::string first = team.failure().status().message();
      for (const char* part :
           {"group test: rank 2, ", "Group.agree",
            is_masked_too_much ? "got a mask without rank 0" : "got an expert of rank 1"}) {
        EXPECT_NE(first.find(part), std::string::npos) << first << " lacks " << part;
      }
      for (const uint32_t r : {0u, 2u}) EXPECT_FALSE(statuses[r].ok());
    }
  }
}

TEST(Failure, APlanWithARankThatHasGoneIsRefused) {
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    for (const bool is_sent : {false, true}) {
      TeamOptions options = SmallTeam(3, 3);
      options.timeout = std::chrono::seconds(600);
      Team team(options);
      const auto statuses = team.Run([&](Rank& rank) {
        if (rank.rank != 0) return Status::Ok();
        GoOnWithoutRank1(rank);
        PlanArrays arrays(rank.shape, 4, mode);
        std::fill(arrays.send_slot.begin(), arrays.send_slot.end(), -1);
        std::fill(arrays.recv_src.begin(), arrays.recv_src.end(), -1);
        const auto rows_per_rank = static_cast<int32_t>(
            mode == Mode::kLl ? 3 * arrays.params.num_tokens : arrays.params.recv_rows);
        if (is_sent) {
          arrays.send_slot[0] = rows_per_rank;
          return RunDispatch(rank, arrays.Dispatch());
        }
        arrays.recv_src[0] = static_cast<int32_t>(rank.shape.max_tokens);
        if (mode == Mode::kLl) return RunCombine(rank, arrays.Combine());
        uint64_t epoch = 0;
        JAX_EP_RETURN_IF_ERROR(StartDispatch(rank, arrays.Dispatch(), &epoch));
        return FinishDispatch(rank, arrays.Dispatch(), epoch);
      });
      const std::string& text = statuses[0].message();
      for (const char* part :
           {is_sent ? "send_slot names a row of rank 1" : "recv_src names a token of rank 1",
            "make a new plan"}) {
        EXPECT_NE(text.find(part), std::string::npos) << text << " lacks " << part;
      }
    }
  }
}

TEST(Failure, TooManyStartsFailAtOnce) {
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    TeamOptions options = SmallTeam(2, 2);
    options.timeout = std::chrono::seconds(600);
    Team team(options);
    const auto statuses = team.Run([&](Rank& rank) {
      PlanArrays arrays(rank.shape, 4, mode);
      JAX_EP_RETURN_IF_ERROR(RunPlan(rank, arrays.params));
      uint64_t epoch = 0;
      for (uint32_t i = 0; i < rank.shape.depth; ++i) {
        JAX_EP_RETURN_IF_ERROR(StartDispatch(rank, arrays.Dispatch(), &epoch));
      }
      return StartDispatch(rank, arrays.Dispatch(), &epoch);
    });
    EXPECT_EQ(team.failure().status().code(), StatusCode::kFailedPrecondition);
    EXPECT_NE(team.failure().status().message().find("max_in_flight"), std::string::npos);
    for (const Status& status : statuses) EXPECT_FALSE(status.ok());
  }
}

TEST(Failure, ADoneNeedsItsStartAndOnlyOnce) {
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    for (const bool is_combine : {false, true}) {
      Team team(SmallTeam(1, 1));
      PlanArrays arrays(team.shape(), 4, mode);
      Rank& rank = team.rank(0);
      ASSERT_TRUE(RunPlan(rank, arrays.params).ok());
      uint64_t epoch = 0;
      const auto start = [&] {
        return is_combine ? StartCombine(rank, arrays.Combine(), &epoch)
                          : StartDispatch(rank, arrays.Dispatch(), &epoch);
      };
      const auto done = [&] {
        return is_combine ? FinishCombine(rank, arrays.Combine(), epoch)
                          : FinishDispatch(rank, arrays.Dispatch(), epoch);
      };
      for (int i = 0; i < 5; ++i) {
        ASSERT_TRUE(start().ok());
        ASSERT_TRUE(done().ok());
      }
      EXPECT_EQ(done().code(), StatusCode::kFailedPrecondition);
    }
  }
}

TEST(Failure, PlansOfAnotherRoutingAreRefused) {
  const auto expect_invalid = [](auto&& spoil) {
    Team team(SmallTeam(1, 1));
    PlanArrays arrays(team.shape(), 4);
    ASSERT_TRUE(RunPlan(team.rank(0), arrays.params).ok());
    const Status status = spoil(team.rank(0), arrays);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.message();
    EXPECT_TRUE(team.failure().failed());
  };
  std::vector<std::byte> rows(1 << 12);
  expect_invalid([&](Rank& rank, PlanArrays& arrays) {
    arrays.recv_src[0] = 1 << 20;
    DispatchParams dispatch = arrays.Dispatch();
    dispatch.x = dispatch.recv_x = rows.data();
    return RunDispatch(rank, dispatch);
  });
  expect_invalid([&](Rank& rank, PlanArrays& arrays) {
    arrays.send_slot[0] = static_cast<int32_t>(arrays.recv_src.size());
    DispatchParams dispatch = arrays.Dispatch();
    dispatch.x = dispatch.recv_x = rows.data();
    return RunDispatch(rank, dispatch);
  });
  expect_invalid([&](Rank& rank, PlanArrays& arrays) {
    arrays.send_slot[1] = static_cast<int32_t>(arrays.recv_src.size());
    CombineParams combine = arrays.Combine();
    combine.y = combine.out = rows.data();
    return RunCombine(rank, combine);
  });
  expect_invalid([&](Rank& rank, PlanArrays& arrays) {
    arrays.params.num_tokens = 5;  // more than max_tokens
    return RunPlan(rank, arrays.params);
  });
}

TEST(Failure, CallsThatTheGroupHasNoRoomForAreRefused) {
  TeamOptions options = SmallTeam(1, 1);
  options.shape.has_ht = false;
  for (const int which : {0, 1, 2}) {
    Team team(options);
    PlanArrays arrays(team.shape(), 4);
    Rank& rank = team.rank(0);
    const Status status = which == 0   ? RunPlan(rank, arrays.params)
                          : which == 1 ? RunDispatch(rank, arrays.Dispatch())
                                       : RunCombine(rank, arrays.Combine());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.message();
  }
  options.shape.ll_tokens = 3;
  Team team(options);
  PlanArrays arrays(team.shape(), 4, Mode::kLl);
  EXPECT_EQ(RunPlan(team.rank(0), arrays.params).code(), StatusCode::kInvalidArgument);
}

TEST(Failure, RanksThatRunDifferentPlansAreTold) {
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    for (const uint32_t node_size : {1u, 2u}) {
      TeamOptions options = SmallTeam(2, node_size);
      options.timeout = std::chrono::seconds(600);
      Team team(options);
      const auto statuses = team.Run([&](Rank& rank) {
        PlanArrays arrays(rank.shape, rank.rank == 0 ? 4 : 3, mode);
        return RunPlan(rank, arrays.params);
      });
      for (const Status& status : statuses) {
        EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status.message();
      }
      const std::string message = team.failure().status().message();
      EXPECT_NE(message.find("same program"), std::string::npos) << message;
      EXPECT_NE(message.find("T = 4"), std::string::npos) << message;
      EXPECT_NE(message.find("T = 3"), std::string::npos) << message;
    }
  }
}

// The group fails while `reader` is in the middle of its copy of the other rank's buffers, which is
// its `held`-th parallel_for. The other rank has nothing else to wait for, yet its call must not
// return: its caller frees the buffers then (AddressSanitizer sees who still reads them).
void ExpectTheOwnerWaitsFor(
    uint32_t reader, int held,
    const std::function<Status(Rank&, const PlanArrays&, const std::byte*)>& run) {
  TeamOptions options = SmallTeam(2, 2);
  options.timeout = std::chrono::seconds(600);
  Team team(options);
  std::atomic<bool> owner_has_returned{false};
  bool returned_too_early = true;
  const auto statuses = team.Run([&](Rank& rank) {
    PlanArrays arrays(rank.shape, 4);
    JAX_EP_RETURN_IF_ERROR(RunPlan(rank, arrays.params));
    if (rank.rank == reader) {
      rank.parallel_for = [&, num_calls = 0](
                              int64_t num_items,
                              const std::function<void(int64_t, int64_t)>& body) mutable {
        if (++num_calls == held) {
          team.failure().Set(Unavailable("rank 2 has gone"));
          const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
          while (!owner_has_returned && std::chrono::steady_clock::now() < until) {
            std::this_thread::yield();
          }
          returned_too_early = owner_has_returned;
        }
        body(0, num_items);
      };
    }
    auto rows = std::make_unique<std::vector<std::byte>>(1 << 12);
    const Status status = run(rank, arrays, rows->data());
    rows.reset();
    if (rank.rank != reader) owner_has_returned = true;
    return status;
  });
  EXPECT_FALSE(returned_too_early);
  EXPECT_EQ(statuses[1 - reader].code(), StatusCode::kUnavailable);
}

TEST(Failure, NobodyLeavesWhileAMateReadsItsRows) {
  // Its own rows, then the padding, then the other rank's rows.
  ExpectTheOwnerWaitsFor(0, 3, [](Rank& rank, const PlanArrays& arrays, const std::byte* rows) {
    DispatchParams dispatch = arrays.Dispatch();
    std::vector<std::byte> recv(arrays.recv_src.size() * rank.shape.hidden * sizeof(float));
    dispatch.x = rows;
    dispatch.recv_x = recv.data();
    return RunDispatch(rank, dispatch);
  });
  // All rows are at rank 0.
  ExpectTheOwnerWaitsFor(1, 1, [](Rank& rank, const PlanArrays& arrays, const std::byte* rows) {
    CombineParams combine = arrays.Combine();
    std::vector<std::byte> out(arrays.send_slot.size() * rank.shape.hidden * sizeof(float));
    combine.y = rows;
    combine.out = out.data();
    return RunCombine(rank, combine);
  });
}

TEST(Failure, AStoppedNetworkEndsInAnError) {
  TeamOptions options = SmallTeam(4, 2);
  options.faulty_spec = "seed=1,die_after=20,die_rank=3";
  options.timeout = std::chrono::seconds(2);
  Team team(options);
  const auto statuses = team.Run([&](Rank& rank) {
    for (int i = 0; i < 1000; ++i) {
      PlanArrays arrays(rank.shape, 4);
      JAX_EP_RETURN_IF_ERROR(RunPlan(rank, arrays.params));
    }
    return Status::Ok();
  });
  for (const Status& status : statuses) EXPECT_FALSE(status.ok());
}

// Waits are counted for the rank that is late, in the phase that it is late in, and in no other.
TEST(WaitCounters, NameTheLateRankAndItsPhase) {
  constexpr std::chrono::milliseconds kLate{150};
  const auto enough = static_cast<uint64_t>(std::chrono::nanoseconds(kLate).count() / 2);
  for (const auto& [channel, phase] : {std::pair{Channel::kPlan, WaitPhase::kPlan},
                                       std::pair{Channel::kLlDispatch, WaitPhase::kDispatch}}) {
    const Mode mode = channel == Channel::kPlan ? Mode::kHt : Mode::kLl;
    Team team({.shape = MakeShape(4, 2, 4, 1, 8, 4)});
    team.rank(3).stall = {.channel = channel, .time = kLate};
    team.Run([&](Rank& rank) -> Status {
      PlanArrays arrays(rank.shape, 4, mode);
      if (mode == Mode::kHt) return RunPlan(rank, arrays.params);
      return RunLlDispatch(rank, {.plan = arrays.params, .dispatch = arrays.Dispatch()});
    });
    ASSERT_FALSE(team.failure().failed()) << team.failure().status().message();
    for (uint32_t waiter = 0; waiter < 4; ++waiter) {
      const RankCounters& counters = team.counters(waiter);
      ASSERT_EQ(counters.wait_by_peer.size(), kNumWaitPhases * 4u);
      const auto waits_in = [&](WaitPhase of) {
        return std::span(counters.wait_by_peer).subspan(static_cast<size_t>(of) * 4, 4);
      };
      uint64_t sum = 0;
      for (uint32_t index = 0; index < kNumWaitPhases; ++index) {
        const auto waits = waits_in(static_cast<WaitPhase>(index));
        EXPECT_EQ(waits[waiter], 0u);
        for (const auto& waited : waits) sum += waited;
      }
      EXPECT_EQ(sum, counters.wait_ns);
      if (waiter != 3) {
        EXPECT_GT(waits_in(phase)[3], enough) << "rank " << waiter;
      }
    }
  }
}

}  // namespace
}  // namespace jax_ep::testing
