// Graphs that hold calls of a group and are replayed after it was closed, as XLA's command buffers
// are: nobody on the host is asked. Their kernels must touch nothing of the group, end, and leave
// outputs that no one takes for results.
#include <gtest/gtest.h>

#include "tests/kernels_gpu/push_scenario.h"

namespace jax_ep::testing {
namespace {

struct Case {
  const char* name;
  Mode mode;
  uint32_t node_size;
  bool in_place;
  bool use_tma;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class GpuClosed : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (NumDevices() == 0) GTEST_SKIP() << "no CUDA device";
    scenario_.mode = GetParam().mode;
    scenario_.layout = Layout::kExpertBatched;
    GroupShape& shape = scenario_.shape;
    shape.num_ranks = 4;
    shape.node_size = GetParam().node_size;
    shape.num_experts = 32;
    shape.top_k = 4;
    shape.align = 4;
    shape.hidden = 256;
    // Heaps of more than the granule that stays.
    shape.max_tokens = shape.ll_tokens = 512;
    shape.elem_type = ElemType::kBf16;
    shape.depth = 3;
    scenario_.num_tokens = 64;
    scenario_.recv_rows = WorstRecvRows(shape, scenario_.layout, scenario_.num_tokens);
    options_ = {.shape = shape,
                .in_place = GetParam().in_place,
                .use_tma = GetParam().use_tma,
                .max_sms = 8,
                .arena_bytes = uint64_t{1} << 30,
                .maps_heaps = true};
  }

  // One rank's graph of every call there is, and what it writes.
  struct Captured {
    DeviceArrays whole, planned, halves, from;
    DeviceArray<int32_t> epochs;
    cudaGraphExec_t graph = nullptr;
  };

  Captured Capture(GpuTeam& team, uint32_t r, const HostArrays& host) {
    Captured c;
    for (auto* arrays : {&c.whole, &c.planned, &c.halves, &c.from}) {
      *arrays = Upload(scenario_, team, r, host);
    }
    c.epochs = DeviceArray<int32_t>::Output(team, r, 2);
    CheckCuda(cudaDeviceSynchronize(), "upload");
    cudaGraph_t graph;
    CheckCuda(cudaStreamBeginCapture(team.stream(r), cudaStreamCaptureModeThreadLocal), "capture");
    Calls calls(scenario_, team, r);
    RunWhole(scenario_, calls, c.whole, c.planned);
    RunHalves(scenario_, calls, c.from, c.halves, c.epochs.data(), /*ends_in_order=*/true);
    CheckCuda(cudaStreamEndCapture(team.stream(r), &graph), "capture");
    EXPECT_EQ(calls.error(), nullptr) << calls.error();
    CheckCuda(cudaGraphInstantiate(&c.graph, graph, 0), "instantiate");
    CheckCuda(cudaGraphDestroy(graph), "destroy");
    return c;
  }

  static void Replay(GpuTeam& team, std::vector<Captured>& captured) {
    for (uint32_t r = 0; r < team.num_ranks(); ++r) {
      team.UseDeviceOf(r);
      CheckCuda(cudaGraphLaunch(captured[r].graph, team.stream(r)), "launch");
    }
    team.SynchronizeOrDie();
  }

  template <typename T>
  static void ExpectPoison(const DeviceArray<T>& array, const char* what) {
    const std::vector<T> got = array.Download();
    const auto* bytes = reinterpret_cast<const uint8_t*>(got.data());
    size_t different = 0;
    for (size_t i = 0; i < got.size() * sizeof(T); ++i) different += bytes[i] != 0xff;
    EXPECT_EQ(different, 0u) << what << ": bytes that are no poison, of " << got.size() * sizeof(T);
    EXPECT_TRUE(array.HasCanary()) << what;
  }

  void ExpectPoisonedOutputs(const Captured& c) {
    ExpectPoison(c.whole.recv_x[0], "recv_x");
    ExpectPoison(c.whole.recv_weights[0], "recv_weights");
    std::vector<const DeviceArrays*> all = {&c.whole, &c.planned};
    if (HasHalves(scenario_)) all.push_back(&c.halves);
    for (const DeviceArrays* arrays : all) {
      ExpectPoison(arrays->recv_src, "recv_src");
      ExpectPoison(arrays->send_slot, "send_slot");
      for (const int32_t size : arrays->group_sizes.Download()) ASSERT_EQ(size, 0);
    }
    for (const int i : {0, 2, 3}) ExpectPoison(c.planned.recv_x[i], "recv_x of a plan");
    ExpectPoison(c.planned.recv_dots, "recv_dots");
    for (int i = 0; i < HostArrays::kCombines; ++i) {
      if (i < 2) ExpectPoison(c.whole.out[i], "out");
      if (i != 1) ExpectPoison(c.whole.pair_scalars_out[i], "pair_scalars_out");
    }
    if (!HasHalves(scenario_)) return;
    ExpectPoison(c.halves.recv_x[0], "recv_x of halves");
    for (const int i : {0, 1}) ExpectPoison(c.halves.out[i], "out of halves");
  }

  Scenario scenario_;
  GpuTeamOptions options_;
};

TEST_P(GpuClosed, AReplayPoisonsItsOutputsAndTouchesNothingElse) {
  Team cpu({.shape = scenario_.shape});
  std::mt19937 random(11);
  const std::vector<HostArrays> host = RunOnCpu(scenario_, cpu, random);
  GpuTeam team(options_);
  std::vector<Captured> captured;
  for (uint32_t r = 0; r < team.num_ranks(); ++r) {
    captured.push_back(Capture(team, r, host[r]));
  }
  std::vector<gpu::DeviceRange> old_heaps;
  for (uint32_t r = 0; r < team.num_ranks(); ++r) old_heaps.push_back(team.mapped_heap(r));
  Replay(team, captured);
  ExpectNoFailure(team);
  for (uint32_t r = 0; r < team.num_ranks(); ++r) ExpectDispatch(captured[r].whole, host[r], 0);
  if (HasFailure()) return;

  const uint64_t kept_before = Api().memory->retired_bytes();
  team.Close();
  EXPECT_GT(Api().memory->retired_bytes(), kept_before);
  EXPECT_LE(Api().memory->retired_bytes() - kept_before, uint64_t{team.num_ranks()} << 21);
  Replay(team, captured);
  for (const Captured& c : captured) ExpectPoisonedOutputs(c);
  if (HasFailure()) return;

  // A new group never gets the old addresses, and old programs beside it do it no harm.
  GpuTeam next(options_);
  for (uint32_t r = 0; r < next.num_ranks(); ++r) {
    for (const gpu::DeviceRange& old : old_heaps) {
      const gpu::DeviceRange heap = next.mapped_heap(r);
      EXPECT_TRUE(heap.base + heap.bytes <= old.base || old.base + old.bytes <= heap.base);
    }
  }
  std::vector<DeviceArrays> whole, planned;
  for (uint32_t r = 0; r < next.num_ranks(); ++r) {
    whole.push_back(Upload(scenario_, next, r, host[r]));
    planned.push_back(Upload(scenario_, next, r, host[r]));
  }
  const std::string error = next.Run([&](uint32_t r) -> const char* {
    CheckCuda(cudaGraphLaunch(captured[r].graph, team.stream(r)), "launch");
    Calls calls(scenario_, next, r);
    RunWhole(scenario_, calls, whole[r], planned[r]);
    CheckCuda(cudaGraphLaunch(captured[r].graph, team.stream(r)), "launch");
    return calls.error() == nullptr ? nullptr : "a launch failed";
  });
  ASSERT_EQ(error, "");
  team.SynchronizeOrDie();
  ExpectNoFailure(next);
  for (uint32_t r = 0; r < next.num_ranks() && !HasFailure(); ++r) {
    ExpectPlan(whole[r], host[r]);
    ExpectDispatch(whole[r], host[r], 0);
    for (int i = 0; i < HostArrays::kCombines; ++i) ExpectCombine(whole[r], host[r], i);
  }
  for (Captured& c : captured) CheckCuda(cudaGraphExecDestroy(c.graph), "destroy");
}

INSTANTIATE_TEST_SUITE_P(All, GpuClosed,
                         ::testing::Values(Case{"ll", Mode::kLl, 4, true, true},
                                           Case{"ht", Mode::kHt, 4, true, true},
                                           Case{"ll_plain", Mode::kLl, 4, true, false},
                                           Case{"ht_plain", Mode::kHt, 4, true, false},
                                           Case{"ht_staged", Mode::kHt, 4, false, true},
                                           Case{"ll_nodes", Mode::kLl, 2, true, true},
                                           Case{"ht_nodes", Mode::kHt, 2, true, true}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace jax_ep::testing
