// Plans behind each other, each with another routing: no record is written over before it was read.
// And what may not be believed of a record.
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "kernels/cpu/plan_tables.h"
#include "tests/kernels/exchange.h"

namespace jax_ep::testing {
namespace {

constexpr int kNumPlans = 60;
constexpr int64_t kTokens = 9;

// What one rank gets from one plan.
struct Outputs {
  Outputs(const GroupShape& shape, int64_t rows)
      : group_sizes(shape.experts_per_rank()),
        group_counts(shape.experts_per_rank()),
        send_slot(static_cast<size_t>(kTokens * shape.top_k)),
        recv_src(static_cast<size_t>(rows)),
        send_counts(shape.num_ranks),
        recv_counts(shape.num_ranks) {}

  std::vector<int32_t> group_sizes, group_counts, send_slot, recv_src, send_counts, recv_counts;
  int32_t num_dropped = -1, overflow = -1;
};

// Every rank makes the same plans; between two of them some rank pauses.
void RunPlansBehindEachOther(const GroupShape& shape, bool in_process, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Routing> routings(kNumPlans);
  std::vector<PlanOracle> oracles;
  std::vector<std::vector<Outputs>> outputs(kNumPlans);  // [plan][rank]
  for (int plan = 0; plan < kNumPlans; ++plan) {
    Routing& routing = routings[static_cast<size_t>(plan)];
    routing.shape = shape;
    routing.num_tokens = kTokens;
    routing.topk_idx = DrawTopk(shape, kTokens, plan % 3 == 0 ? Draw::kZipf : Draw::kMessy, random);
    routing.recv_rows = WorstRecvRows(shape, routing.layout, kTokens);
    oracles.push_back(MakePlanOracle(routing));
    outputs[static_cast<size_t>(plan)].assign(shape.num_ranks, Outputs(shape, routing.recv_rows));
  }
  Team team({.shape = shape, .in_process = in_process});
  const auto statuses = team.Run([&](Rank& rank) {
    std::mt19937 pauses(seed + rank.rank);
    rank.TakeSizes(shape);
    for (size_t plan = 0; plan < kNumPlans; ++plan) {
      Outputs& out = outputs[plan][rank.rank];
      PlanParams params;
      params.num_tokens = kTokens;
      params.recv_rows = routings[plan].recv_rows;
      params.topk_idx = routings[plan].topk_idx[rank.rank];
      params.out.group_sizes = out.group_sizes;
      params.out.group_counts = out.group_counts;
      params.out.send_slot = out.send_slot;
      params.out.recv_src = out.recv_src;
      params.out.send_counts = out.send_counts;
      params.out.recv_counts = out.recv_counts;
      params.out.num_dropped = &out.num_dropped;
      params.out.overflow = &out.overflow;
      // One rank is late, then another: the others are as far ahead as they can get.
      if (pauses() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
      JAX_EP_RETURN_IF_ERROR(RunPlan(rank, params));
    }
    return Status::Ok();
  });
  for (const Status& status : statuses) ASSERT_TRUE(status.ok()) << status.message();
  for (size_t plan = 0; plan < kNumPlans; ++plan) {
    for (uint32_t rank = 0; rank < shape.num_ranks; ++rank) {
      SCOPED_TRACE("plan " + std::to_string(plan) + ", rank " + std::to_string(rank));
      const Outputs& got = outputs[plan][rank];
      ASSERT_EQ(got.recv_src, oracles[plan].recv_src[rank]);
      ASSERT_EQ(got.send_slot, oracles[plan].send_slot[rank]);
      ASSERT_EQ(got.group_sizes, oracles[plan].group_sizes[rank]);
      ASSERT_EQ(got.group_counts, oracles[plan].group_counts[rank]);
      ASSERT_EQ(got.send_counts, oracles[plan].send_counts[rank]);
      ASSERT_EQ(got.recv_counts, oracles[plan].recv_counts[rank]);
      ASSERT_EQ(got.num_dropped, oracles[plan].num_dropped[rank]);
    }
  }
}

TEST(Plan, RecordsOfPlansBehindEachOtherAreNotMixed) {
  for (const uint32_t node_size : {4u, 2u, 1u}) {
    for (const uint32_t depth : {1u, 2u, 7u}) {
      GroupShape shape = MakeShape(4, node_size, 12, 3, 8, kTokens);
      shape.depth = depth;
      RunPlansBehindEachOther(shape, /*in_process=*/depth != 2, node_size * 10 + depth);
      if (HasFailure()) return;
    }
  }
}

// A record comes over the network: nothing in it is an index before it was checked.
TEST(Plan, RecordsThatCannotBeAreRefused) {
  const GroupShape shape = MakeShape(4, 2, 8, 2, 8, kTokens);
  const int64_t num_pairs = kTokens * 2;
  std::vector<int32_t> counts(shape.num_experts, 2);
  EXPECT_TRUE(AreCountsInRange(shape, num_pairs, counts.data()));
  counts[3] = 5;  // 19 pairs
  EXPECT_FALSE(AreCountsInRange(shape, num_pairs, counts.data()));
  counts[3] = -1;
  EXPECT_FALSE(AreCountsInRange(shape, num_pairs, counts.data()));
  counts[3] = INT32_MAX;
  EXPECT_FALSE(AreCountsInRange(shape, num_pairs, counts.data()));

  counts[3] = 2;  // rank 1 has experts 2 and 3: four codes
  std::vector<int32_t> codes = {0, 17, 5, 3};
  const SourceRouting source{.counts = counts.data(), .codes = codes.data()};
  EXPECT_TRUE(AreCodesInRange(shape, 1, num_pairs, source));
  codes[2] = 18;
  EXPECT_FALSE(AreCodesInRange(shape, 1, num_pairs, source));
  codes[2] = -1;
  EXPECT_FALSE(AreCodesInRange(shape, 1, num_pairs, source));
}

}  // namespace
}  // namespace jax_ep::testing
