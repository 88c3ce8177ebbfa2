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
};

std::vector<Named> Areas(const HeapLayout& layout, const GroupShape& shape) {
  const uint64_t num_ranks = shape.num_ranks;
  const uint64_t num_nodes = shape.num_nodes();
  std::vector<Named> areas = {{"dispatch_published", layout.dispatch_published, 1},
                              {"combine_published", layout.combine_published, 1},
                              {"plan_send", layout.plan_send, 1},
                              {"plan_recv", layout.plan_recv, num_ranks},
                              {"stage", layout.stage, 1},
                              {"send_stage", layout.send_stage, num_nodes},
                              {"net_recv", layout.net_recv, num_nodes},
                              {"reduce_stage", layout.reduce_stage, num_ranks},
                              {"comb_send", layout.comb_send, num_nodes},
                              {"comb_recv", layout.comb_recv, num_nodes},
                              {"ll_disp", layout.ll_disp, num_ranks},
                              {"ll_disp_send", layout.ll_disp_send, 1},
                              {"ll_comb", layout.ll_comb, num_ranks},
                              {"ll_comb_send", layout.ll_comb_send, num_ranks}};
  std::erase_if(areas, [](const Named& named) { return named.area.offset == 0; });  // not there
  std::sort(areas.begin(), areas.end(),
            [](const Named& a, const Named& b) { return a.area.offset < b.area.offset; });
  return areas;
}

TEST(HeapLayout, AreasAreAlignedAndDoNotOverlap) {
  for (const GroupShape& shape : {Shape(8, 2), Shape(8, 8), Shape(1, 1), Shape(6, 3)}) {
    const HeapLayout layout = HeapLayout::Make(shape);
    uint64_t end = layout.flag_offset(Channel::kBarrier, shape.num_ranks - 1) + sizeof(uint64_t);
    EXPECT_GE(layout.flags_offset, sizeof(ControlBlock));
    EXPECT_EQ(layout.flags_offset % kAreaAlignBytes, 0u);
    for (const Named& named : Areas(layout, shape)) {
      SCOPED_TRACE(named.name);
      EXPECT_GE(named.area.offset, end);
      for (uint32_t set = 0; set < shape.depth; ++set) {
        for (uint64_t peer = 0; peer < named.num_peers; ++peer) {
          EXPECT_EQ(named.area.At(set, peer) % kAreaAlignBytes, 0u);
        }
      }
      EXPECT_EQ(named.area.set_stride, named.num_peers * named.area.peer_stride);
      end = named.area.At(shape.depth, 0);
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
  EXPECT_GE(layout.plan_recv.peer_stride, 16 + 24 * 4 + 77 * 5 * 4);
}

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
  static_assert(kNumChannels > static_cast<uint32_t>(Channel::kBarrier));
}

// Later GPU code computes the same offsets at compile time.
static_assert(HeapLayout::Make(GroupShape{}).total_bytes > sizeof(ControlBlock));

}  // namespace
}  // namespace jax_ep
