// Plan, dispatch, combine and both backward forms on GPUs, bit for bit what the CPU kernels (which
// are checked against the oracle) make of the same inputs.
#include <gtest/gtest.h>

#include "tests/kernels_gpu/scenario.h"

namespace jax_ep::testing {
namespace {

// A plan of mode ll is made here, its rows travel in push_gpu_test.cc.
const char* LaunchAll(const Scenario& s, GpuTeam& team, uint32_t r, DeviceArrays& d) {
  const PlanParams plan = PlanOf(s, d);
  if (const char* error = Api().plan(team.handle(r), &s.shape, &plan, team.stream(r))) return error;
  if (s.mode == Mode::kLl) return nullptr;
  for (int i = 0; i < DeviceArrays::kDispatches; ++i) {
    const DispatchParams params = DispatchOf(s, d, i);
    if (const char* error = Api().dispatch(team.handle(r), &s.shape, &params, team.stream(r)))
      return error;
  }
  for (int i = 0; i < DeviceArrays::kCombines; ++i) {
    const CombineParams params = CombineOf(s, d, i);
    if (const char* error = Api().combine(team.handle(r), &s.shape, &params, team.stream(r)))
      return error;
  }
  return nullptr;
}

void Compare(const Scenario& s, const DeviceArrays& d, const HostArrays& h) {
  ExpectPlan(d, h);
  if (s.mode == Mode::kLl) return;
  for (int i = 0; i < DeviceArrays::kDispatches; ++i) ExpectDispatch(d, h, i);
  for (int i = 0; i < DeviceArrays::kCombines; ++i) ExpectCombine(d, h, i);
}

void RunScenario(const Scenario& s, Team& cpu, GpuTeam& team, std::mt19937& random) {
  SCOPED_TRACE(s.Name());
  std::vector<HostArrays> host = RunOnCpu(s, cpu, random);
  if (::testing::Test::HasFailure()) return;
  team.Reset();
  std::vector<DeviceArrays> device;
  for (uint32_t r = 0; r < team.num_ranks(); ++r) device.push_back(Upload(s, team, r, host[r]));
  const std::string error = team.Run([&](uint32_t r) { return LaunchAll(s, team, r, device[r]); });
  ASSERT_EQ(error, "");
  ExpectNoFailure(team);
  for (uint32_t r = 0; r < team.num_ranks(); ++r) {
    SCOPED_TRACE("rank " + std::to_string(r));
    Compare(s, device[r], host[r]);
    if (::testing::Test::HasFailure()) return;
  }
}

// Also rows that are no multiple of the alignment.
int64_t DrawAnyRecvRows(const Scenario& s, std::mt19937& random) {
  if (s.layout != Layout::kExpertMajor || random() % 4 != 0) return DrawRecvRows(s, random);
  return s.num_tokens * s.shape.top_k + static_cast<int64_t>(random() % 7);
}

class GpuExchange : public ::testing::Test {
 protected:
  void SetUp() override {
    if (NumDevices() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_F(GpuExchange, RandomScenariosGiveTheBitsOfTheCpu) {
  const uint32_t num_seeds = NumSeeds(80);
  for (uint32_t seed = 0; seed < num_seeds && !HasFailure(); ++seed) {
    std::mt19937 random(seed);
    GroupShape shape;
    shape.num_ranks = Pick<uint32_t>(random, {1, 2, 3, 4, 4, 6, 8, 12});
    shape.node_size = DrawNodeSize(shape.num_ranks, random);
    const auto experts = Pick<uint32_t>(random, {1, 3, 4, 40});
    shape.num_experts = shape.num_ranks * experts;
    shape.top_k = std::min(Pick<uint32_t>(random, {1, 2, 8, 8, 64}), shape.num_experts);
    shape.align = Pick<uint32_t>(random, {1, 4, 24});
    shape.elem_type = Pick(random, {ElemType::kF32, ElemType::kBf16, ElemType::kF16});
    shape.hidden = Pick<uint64_t>(random, {8, 136, 513, 1024, 7168});
    shape.max_tokens = Pick<uint64_t>(random, {1, 40, 130, 300});
    if (shape.hidden > 1000 && shape.top_k * shape.max_tokens > 1000) shape.max_tokens = 40;
    if (shape.num_experts * shape.max_tokens * shape.hidden > 20'000'000) shape.max_tokens = 3;
    ShrinkIfAsked(shape);
    shape.ll_tokens = shape.max_tokens;
    shape.f32_partials = random() % 2 == 0;
    // Between nodes; so that calls of 40 tokens and more have several rounds.
    if (seed / 3 % 2 == 0) shape.round_tokens = Pick<uint64_t>(random, {32, 32, 64, 100});
    GpuTeamOptions options{.shape = shape};
    options.in_place = random() % 4 != 0;
    options.use_tma = random() % 3 != 0;
    options.max_sms = SmsThatFit(Pick<uint32_t>(random, {3, 16}), shape.num_ranks);
    options.piece_bytes = Pick<uint32_t>(random, {0, 512});
    options.arena_bytes = uint64_t{1} << 30;
    options.num_rings = Pick<uint32_t>(random, {1, 1, 2});
    options.operations_before = OperationsBefore(seed);
    options.has_device_stages = seed % 2 == 0;
    options.least_slice_bytes = Pick<uint64_t>(random, {1, 1, 4096, 0});
    const bool is_view = seed % 3 == 1;  // calls are smaller than the group
    if (is_view) options.shape = ShapeWithMoreRoom(shape);
    Team cpu({.shape = shape}), whole_cpu({.shape = options.shape});
    GpuTeam team(options);
    for (int round = 0; round < 3 && !HasFailure(); ++round) {
      SCOPED_TRACE("seed " + std::to_string(seed) + (options.in_place ? "" : " staged") +
                   (is_view ? " view" : "") + (options.use_tma ? "" : " plain"));
      const bool is_whole = is_view && round == 1;  // between two calls of the view
      Scenario s{.shape = is_whole ? options.shape : shape, .mode = Mode::kHt};
      s.layout = Pick(random, {Layout::kExpertMajor, Layout::kExpertMajor, Layout::kExpertBatched,
                               Layout::kRankMajor});
      s.mode = random() % 6 == 0 ? Mode::kLl : Mode::kHt;
      s.num_tokens =
          static_cast<int64_t>(round == 0 ? shape.max_tokens : random() % (shape.max_tokens + 1));
      s.draw = Pick(random, {Draw::kUniform, Draw::kZipf, Draw::kOneExpert, Draw::kIdleRank,
                             Draw::kMessy, Draw::kMessy});
      s.recv_rows = DrawAnyRecvRows(s, random);
      if (random() % 5 == 0) s.misalignment = ElemBytes(shape.elem_type);
      RunScenario(s, is_whole ? whole_cpu : cpu, team, random);
    }
  }
}

// Of 66 chunks, whose commands one warp pushes 32 at a time.
TEST_F(GpuExchange, OneLongSliceBetweenNodes) {
  for (const bool has_device_stages : {false, true}) {
    for (const Draw draw : {Draw::kUniform, Draw::kOneExpert, Draw::kIdleRank}) {
      GroupShape shape;
      shape.num_ranks = 2;
      shape.node_size = 1;
      shape.num_experts = 16;
      shape.top_k = 1;
      shape.hidden = 64;
      shape.max_tokens = 65 * 32 + 5;
      shape.elem_type = ElemType::kBf16;
      Team cpu({.shape = shape});
      GpuTeam team({.shape = shape,
                    .has_device_stages = has_device_stages,
                    .least_slice_bytes = ~uint64_t{0}});
      std::mt19937 random(11);
      Scenario s{.shape = shape, .mode = Mode::kHt, .draw = draw};
      s.num_tokens = static_cast<int64_t>(shape.max_tokens);
      s.recv_rows = s.num_tokens * 2;
      RunScenario(s, cpu, team, random);
      if (HasFailure()) return;
    }
  }
}

TEST_F(GpuExchange, AModelSizedShape) {
  for (const bool use_tma : {true, false}) {
    GroupShape shape;
    shape.num_ranks = shape.node_size = 4;
    shape.num_experts = 256;
    shape.top_k = 8;
    shape.align = 128;
    shape.hidden = 7168;
    shape.max_tokens = 256;
    shape.elem_type = ElemType::kBf16;
    shape.f32_partials = false;
    Team cpu({.shape = shape});
    GpuTeam team({.shape = shape, .use_tma = use_tma, .arena_bytes = uint64_t{3} << 30});
    std::mt19937 random(5);
    Scenario s{.shape = shape, .mode = Mode::kHt, .num_tokens = 256};
    s.recv_rows = 256 * 8 * 5 / 4 + 64 * 128;
    RunScenario(s, cpu, team, random);
    if (HasFailure()) return;
  }
}

// One graph per rank, replayed while the routing changes.
TEST_F(GpuExchange, GraphReplaysFollowTheirInputs) {
  GroupShape shape;
  shape.num_ranks = shape.node_size = 4;
  shape.num_experts = 32;
  shape.top_k = 4;
  shape.align = 8;
  shape.hidden = 256;
  shape.max_tokens = 64;
  shape.elem_type = ElemType::kBf16;
  Team cpu({.shape = shape});
  GpuTeam team({.shape = shape});
  std::mt19937 random(9);
  Scenario s{.shape = shape, .mode = Mode::kHt, .num_tokens = 64};
  s.recv_rows = 64 * 4 + 16;
  std::vector<HostArrays> host = RunOnCpu(s, cpu, random);
  std::vector<DeviceArrays> device;
  std::vector<cudaGraphExec_t> graphs(4);
  for (uint32_t r = 0; r < 4; ++r) {
    device.push_back(Upload(s, team, r, host[r]));
    cudaGraph_t graph;
    CheckCuda(cudaStreamBeginCapture(team.stream(r), cudaStreamCaptureModeThreadLocal), "capture");
    const char* error = LaunchAll(s, team, r, device[r]);
    ASSERT_EQ(error, nullptr) << error;
    CheckCuda(cudaStreamEndCapture(team.stream(r), &graph), "capture");
    CheckCuda(cudaGraphInstantiate(&graphs[r], graph, 0), "instantiate");
    CheckCuda(cudaGraphDestroy(graph), "destroy");
  }
  for (int round = 0; round < 100 && !HasFailure(); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const bool checks = round % 10 == 0;
    if (checks) {
      s.draw = round % 20 == 0 ? Draw::kMessy : Draw::kZipf;
      host = RunOnCpu(s, cpu, random);
      for (uint32_t r = 0; r < 4; ++r) Refresh(team, r, device[r], host[r]);
    }
    for (uint32_t r = 0; r < 4; ++r) {
      team.UseDeviceOf(r);
      CheckCuda(cudaGraphLaunch(graphs[r], team.stream(r)), "launch");
    }
    if (!checks) continue;
    team.Synchronize();
    ExpectNoFailure(team);
    for (uint32_t r = 0; r < 4 && !HasFailure(); ++r) Compare(s, device[r], host[r]);
  }
  team.Synchronize();
  for (cudaGraphExec_t graph : graphs) CheckCuda(cudaGraphExecDestroy(graph), "destroy");
}

}  // namespace
}  // namespace jax_ep::testing
