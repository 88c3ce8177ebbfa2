#include "kernels/gpu/protocol/plan_slices.h"

#include <gtest/gtest.h>

namespace jax_ep::gpu {
namespace {

GroupShape ShapeOf(uint32_t num_ranks, uint32_t num_experts) {
  GroupShape shape;
  shape.num_ranks = shape.node_size = num_ranks;
  shape.num_experts = num_experts;
  return shape;
}

TEST(PlanSlices, HoldAllPairsWithinTheirBounds) {
  for (const uint32_t num_ranks : {1u, 2u, 4u, 8u, 16u}) {
    for (const uint32_t experts : {1u, 3u, 32u, 256u}) {
      for (const uint64_t pairs : {0ul, 1ul, 7ul, 1024ul, 1025ul, 32768ul, 524287ul}) {
        const GroupShape shape = ShapeOf(num_ranks, experts * num_ranks);
        const PlanSlices slices = SlicesOf(shape, pairs);
        SCOPED_TRACE(testing::Message() << num_ranks << " ranks, " << shape.num_experts
                                        << " experts, " << pairs << " pairs");
        if (slices.count == 0) continue;
        EXPECT_LE(slices.count, MostPlanSlices(num_ranks));
        EXPECT_LE(slices.count * num_ranks, kMaxGroupSlices);
        EXPECT_GE(uint64_t{slices.count} * slices.num_pairs, pairs);
        EXPECT_LT(slices.num_pairs, 1u << 16) << "numbers have 16 bits";
      }
    }
  }
}

TEST(PlanSlices, ServeTheShapesOfModels) {
  constexpr uint64_t kPairs = 4096 * 8;
  const PlanSlices of_two = SlicesOf(ShapeOf(2, 256), kPairs);
  EXPECT_EQ(of_two.count, 32u);
  EXPECT_EQ(of_two.num_pairs, 1024u);
  EXPECT_GT(SlicesOf(ShapeOf(8, 256), kPairs).count, 0u);
  EXPECT_GT(SlicesOf(ShapeOf(8, 512), 16384 * 8).count, 0u);
}

TEST(PlanSlices, AreNotForManyRanksNodesOrExperts) {
  EXPECT_EQ(SlicesOf(ShapeOf(17, 17 * 8), 1024).count, 0u);
  EXPECT_EQ(SlicesOf(ShapeOf(2, 1u << 16), 1024).count, 0u);
  EXPECT_EQ(SlicesOf(ShapeOf(16, 16), uint64_t{1} << 22).count, 0u) << "over 16 bits of pairs";
  GroupShape two_nodes = ShapeOf(4, 32);
  two_nodes.node_size = 2;
  EXPECT_EQ(SlicesOf(two_nodes, 1024).count, 0u);
}

}  // namespace
}  // namespace jax_ep::gpu
