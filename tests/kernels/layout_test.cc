#include "kernels/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace jax_ep {
namespace {

GroupShape Shape(uint32_t num_ranks, uint32_t node_size) {
  GroupShape shape;
  shape.num_ranks = num_ranks;
  shape.node_size = node_size;
  shape.num_experts = num_ranks * 3;
  shape.top_k = 5;
  shape.hidden = 513;
  shape.max_tokens = 77;
  shape.ll_tokens = 9;
  shape.elem_type = ElemType::kBf16;
  return shape;
}

struct Named {
  const char* name;
  HeapArea area;
  uint64_t num_peers;
  uint64_t num_sets;
};

std::vector<Named> Areas(const HeapLayout& layout, const GroupShape& shape) {
  const uint64_t num_ranks = shape.num_ranks;
  const uint64_t num_nodes = shape.num_nodes();
  const uint64_t depth = shape.depth;
  const uint64_t row_sets = layout.dispatch_rounds.num_sets(depth);
  const uint64_t sum_sets = layout.combine_rounds.num_sets(depth);
  const uint64_t ll_sets = layout.ll_rounds.num_sets(depth);
  std::vector<Named> areas = {{"dispatch_published", layout.dispatch_published, 1, depth},
                              {"combine_published", layout.combine_published, 1, depth},
                              {"plan_send", layout.plan_send, 1, kPlanSets},
                              {"plan_recv", layout.plan_recv, num_nodes, kPlanSets},
                              {"stage", layout.stage, 1, depth},
                              {"send_stage", layout.send_stage, num_nodes, row_sets},
                              {"net_recv", layout.net_recv, num_nodes, row_sets},
                              {"reduce_stage", layout.reduce_stage, num_ranks, sum_sets},
                              {"comb_send", layout.comb_send, num_nodes, sum_sets},
                              {"comb_recv", layout.comb_recv, num_nodes, sum_sets},
                              {"ll_disp", layout.ll_disp, num_ranks, ll_sets},
                              {"ll_disp_send", layout.ll_disp_send, 1, ll_sets},
                              {"ll_comb", layout.ll_comb, 1, ll_sets},
                              {"ll_comb_send", layout.ll_comb_send, num_ranks, ll_sets}};
  std::erase_if(areas, [](const Named& named) { return named.area.offset == 0; });  // not there
  std::sort(areas.begin(), areas.end(),
            [](const Named& a, const Named& b) { return a.area.offset < b.area.offset; });
  return areas;
}

TEST(HeapLayout, AreasAreAlignedAndDoNotOverlap) {
  for (const GroupShape& shape : {Shape(8, 2), Shape(8, 8), Shape(1, 1), Shape(6, 3), Shape(40, 4),
                                  Shape(72, 72), Shape(1024, 8)}) {
    const HeapLayout layout = HeapLayout::Make(shape);
    uint64_t end = layout.flag_offset(kLastChannel, shape.num_ranks - 1) + sizeof(uint64_t);
    EXPECT_GE(layout.flags_offset, sizeof(ControlBlock));
    EXPECT_EQ(layout.flags_offset % kAreaAlignBytes, 0u);
    for (const Named& named : Areas(layout, shape)) {
      SCOPED_TRACE(named.name);
      EXPECT_GE(named.area.offset, end);
      for (uint32_t set = 0; set < named.num_sets; ++set) {
        for (uint64_t peer = 0; peer < named.num_peers; ++peer) {
          EXPECT_EQ(named.area.At(set, peer) % kAreaAlignBytes, 0u);
        }
      }
      EXPECT_EQ(named.area.set_stride, named.num_peers * named.area.peer_stride);
      end = named.area.At(named.num_sets, 0);
      EXPECT_LE(end, layout.total_bytes);
    }
    EXPECT_EQ(layout.total_bytes % kAreaAlignBytes, 0u);
    EXPECT_LT(layout.total_bytes - end, kAreaAlignBytes);
  }
}

TEST(HeapLayout, BlocksHoldTheLargestCall) {
  const GroupShape shape = Shape(8, 2);
  const HeapLayout layout = HeapLayout::Make(shape);
  const uint64_t row = AlignUp(513 * 2, 16) + AlignUp(5 * 4, 16);
  EXPECT_GE(layout.stage.peer_stride, 77 * row);
  EXPECT_GE(layout.net_recv.peer_stride, AlignUp(77 * 4, 16) + 77 * row);
  const uint64_t partial = AlignUp(513 * 4, 16);  // f32 partials of a bf16 group
  EXPECT_GE(layout.reduce_stage.peer_stride, 77 + 77 * (partial + AlignUp(5 * 4, 16)));
  EXPECT_GE(layout.comb_recv.peer_stride, 77 * (partial + AlignUp(2 * 5 * 4, 16)));
  EXPECT_GE(layout.ll_disp.peer_stride, 16 + 2 * AlignUp(9 * 5 * 4, 16) + 9 * AlignUp(513 * 2, 16));
  EXPECT_GE(layout.plan_recv.peer_stride, 16 + 24 * 4 + 77 * 5 * 4 + 2 * 16);
}

TEST(HeapLayout, RoundsFillTheBlocksThatFit) {
  const HeapLayout few = HeapLayout::Make(Shape(8, 2));
  for (const Rounds& rounds : {few.dispatch_rounds, few.combine_rounds}) {
    EXPECT_FALSE(rounds.is_split);
    EXPECT_EQ(rounds.tokens, 77u);
  }
  EXPECT_FALSE(few.ll_rounds.is_split);
  const HeapLayout many = HeapLayout::Make(Shape(1024, 8));
  EXPECT_TRUE(many.dispatch_rounds.is_split);
  EXPECT_EQ(many.dispatch_rounds.tokens, 77u * 4 / 128);
  EXPECT_EQ(many.combine_rounds.tokens, 1u);  // less than a token each
  EXPECT_EQ(many.ll_rounds.tokens, 8u);
  // One node: nobody sends rows, and a rank reads all of its mates' at once.
  EXPECT_FALSE(HeapLayout::Make(Shape(72, 72)).dispatch_rounds.is_split);
  EXPECT_EQ(HeapLayout::Make(Shape(72, 72)).combine_rounds.tokens, 77u * 8 / 72);
  GroupShape limited = Shape(8, 2);
  limited.round_tokens = 5;
  EXPECT_EQ(HeapLayout::Make(limited).combine_rounds.tokens, 5u);
  EXPECT_EQ(HeapLayout::Make(limited).dispatch_rounds.tokens, 5u);
  EXPECT_EQ(HeapLayout::Make(limited).ll_rounds.tokens, 5u);
}

// The sizes of DeepSeek-V3. tests/jax_ep/test_memory.py holds the formula of docs/tuning.md.
constexpr GroupShape Large(uint32_t num_ranks, uint64_t ht_tokens, uint64_t ll_tokens) {
  return {.num_ranks = num_ranks,
          .node_size = 8,
          .num_experts = num_ranks < 256 ? 256 : num_ranks,
          .top_k = 8,
          .hidden = 7168,
          .max_tokens = ht_tokens != 0 ? ht_tokens : ll_tokens,
          .ll_tokens = ll_tokens,
          .elem_type = ElemType::kBf16,
          .has_ht = ht_tokens != 0};
}
constexpr uint64_t HeapBytes(const GroupShape& shape) {
  return HeapLayout::Make(shape).total_bytes;
}
constexpr uint64_t kGibibyte = uint64_t{1} << 30;
static_assert(HeapBytes(Large(8, 4096, 0)) < 2 * kGibibyte);
static_assert(HeapBytes(Large(64, 4096, 0)) < 5 * kGibibyte / 2);
static_assert(HeapBytes(Large(256, 4096, 0)) < 5 * kGibibyte / 2);
static_assert(HeapBytes(Large(1024, 4096, 0)) < 5 * kGibibyte / 2);
static_assert(HeapBytes(Large(8, 0, 128)) < kGibibyte);
static_assert(HeapBytes(Large(64, 0, 128)) < kGibibyte);
static_assert(HeapBytes(Large(256, 0, 128)) < kGibibyte);
static_assert(HeapBytes(Large(1024, 0, 128)) < kGibibyte);

TEST(HeapLayout, GroupsTakeOnlyWhatTheyNeed) {
  GroupShape shape = Shape(8, 8);
  const HeapLayout one_node = HeapLayout::Make(shape);
  EXPECT_EQ(one_node.net_recv.offset, 0u);
  EXPECT_EQ(one_node.ll_disp_send.offset, 0u);
  shape.has_ht = false;
  const HeapLayout only_ll = HeapLayout::Make(shape);
  EXPECT_EQ(only_ll.stage.offset, 0u);
  EXPECT_LT(only_ll.total_bytes, one_node.total_bytes);
  shape.ll_tokens = 0;
  EXPECT_EQ(HeapLayout::Make(shape).ll_disp.offset, 0u);
}

TEST(HeapLayout, FlagsOfAllChannelsAndSourcesAreDistinct) {
  const HeapLayout layout = HeapLayout::Make(Shape(8, 2));
  EXPECT_EQ(layout.flag_offset(Channel::kOrder, 0), layout.flags_offset);
  EXPECT_EQ(layout.flag_offset(Channel::kOrder, 7) + 8, layout.flag_offset(Channel::kPlan, 0));
  static_assert(kNumChannels > static_cast<uint32_t>(kLastChannel));
}

// Later GPU code computes the same offsets at compile time.
static_assert(HeapLayout::Make(GroupShape{}).total_bytes > sizeof(ControlBlock));

}  // namespace
}  // namespace jax_ep
