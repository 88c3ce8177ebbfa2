// Calls of a view may take more shared memory than the largest call of its group: shorter rows
// leave room for more of them. In a process of its own: what a kernel may have belongs to the
// process, and other groups ask for it too.
#include <gtest/gtest.h>

#include "tests/kernels_gpu/push_scenario.h"

namespace jax_ep::testing {
namespace {

TEST(GpuView, MayTakeMoreSharedMemoryThanItsGroup) {
  if (NumDevices() == 0) GTEST_SKIP() << "no CUDA device";
  GroupShape group;
  group.num_ranks = group.node_size = 2;
  group.num_experts = 8;
  group.top_k = 2;
  group.align = 4;
  group.hidden = 16384;
  group.max_tokens = group.ll_tokens = 128;
  group.elem_type = ElemType::kBf16;
  Scenario s{.shape = group, .mode = Mode::kLl, .layout = Layout::kExpertBatched};
  s.shape.hidden = 14336;
  s.num_tokens = 128;
  s.recv_rows = WorstRecvRows(s.shape, s.layout, s.num_tokens);
  Team cpu({.shape = s.shape});
  GpuTeam team({.shape = group, .arena_bytes = uint64_t{2} << 30});
  std::mt19937 random(3);
  RunPushScenario(s, cpu, team, random);
}

}  // namespace
}  // namespace jax_ep::testing
