// What the host does around kernels: several groups and threads in one process, and launches that
// fail.
#include <cuda.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "kernels/gpu/protocol/heap_layout.h"
#include "tests/kernels_gpu/push_scenario.h"

namespace jax_ep::testing {
namespace {

class GpuLaunch : public ::testing::Test {
 protected:
  void SetUp() override {
    if (NumDevices() == 0) GTEST_SKIP() << "no CUDA device";
  }

  static Scenario ScenarioOf(uint32_t num_ranks, uint32_t num_experts, Mode mode) {
    Scenario s{.mode = mode, .layout = Layout::kExpertMajor, .num_tokens = 40};
    s.shape.num_ranks = s.shape.node_size = num_ranks;
    s.shape.num_experts = num_experts;
    s.shape.top_k = 4;
    s.shape.align = 4;
    s.shape.hidden = 256;
    s.shape.max_tokens = s.shape.ll_tokens = 64;
    s.shape.elem_type = ElemType::kBf16;
    s.recv_rows = WorstRecvRows(s.shape, s.layout, s.num_tokens);
    return s;
  }

  // All calls of the scenario on the team, and their results.
  static void ExpectRight(const Scenario& s, GpuTeam& team) {
    SCOPED_TRACE(s.Name());
    Team cpu({.shape = s.shape});
    std::mt19937 random(41);
    const std::vector<HostArrays> host = RunOnCpu(s, cpu, random);
    team.Reset();
    std::vector<DeviceArrays> whole, planned;
    for (uint32_t r = 0; r < team.num_ranks(); ++r) {
      whole.push_back(Upload(s, team, r, host[r]));
      planned.push_back(Upload(s, team, r, host[r]));
    }
    std::string wrong;
    for (uint32_t r = 0; r < team.num_ranks(); ++r) {
      team.UseDeviceOf(r);
      Calls calls(s, team, r);
      RunWhole(s, calls, whole[r], planned[r]);
      if (calls.error() != nullptr) wrong += calls.error();
    }
    team.SynchronizeOrDie();
    ASSERT_EQ(wrong, "");
    ExpectNoFailure(team);
    for (uint32_t r = 0; r < team.num_ranks() && !HasFailure(); ++r) {
      ExpectPlan(whole[r], host[r]);
      ExpectDispatch(whole[r], host[r], 0);
      for (int i = 0; i < HostArrays::kDispatches; ++i) ExpectDispatch(planned[r], host[r], i);
      for (int i = 0; i < HostArrays::kCombines; ++i) ExpectCombine(whole[r], host[r], i);
    }
  }
};

// The dynamic shared memory that a kernel may have belongs to the process: a later, smaller group
// took it away from the first, whose plans could not be launched any more.
TEST_F(GpuLaunch, ASmallerGroupTakesNothingFromALargerOne) {
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    const Scenario large = ScenarioOf(2, 512, mode);
    const Scenario small = ScenarioOf(2, 8, mode);
    GpuTeam first({.shape = large.shape, .timeout_ns = 5'000'000'000});
    GpuTeam second({.shape = small.shape, .timeout_ns = 5'000'000'000});
    ExpectRight(large, first);
    ExpectRight(small, second);
  }
}

// The code that runs decides, not the device: that of compute_80 on sm_90 has no bulk copies.
TEST_F(GpuLaunch, BulkCopiesAreUsedWhereTheLoadedCodeHasThem) {
  const Scenario s = ScenarioOf(2, 8, Mode::kHt);
  for (const bool use_tma : {true, false}) {
    GpuTeam team({.shape = s.shape, .use_tma = use_tma, .timeout_ns = 5'000'000'000});
    const bool has_bulk_copies = Api().uses_bulk_copies(team.handle(0));
    std::printf("use_tma %d: bulk copies %d\n", use_tma, has_bulk_copies);
    if (!use_tma) {
      EXPECT_FALSE(has_bulk_copies);
    }
    ExpectRight(s, team);
  }
}

// The kernels of one operation stand together on the stream, whichever threads launch there.
TEST_F(GpuLaunch, ThreadsMayShareARank) {
  const Scenario s = ScenarioOf(1, 8, Mode::kHt);
  Team cpu({.shape = s.shape});
  std::mt19937 random(42);
  const std::vector<HostArrays> host = RunOnCpu(s, cpu, random);
  GpuTeam team({.shape = s.shape, .timeout_ns = 5'000'000'000});
  constexpr int kThreads = 4, kRounds = 100;
  std::vector<DeviceArrays> arrays;
  for (int i = 0; i < kThreads; ++i) arrays.push_back(Upload(s, team, 0, host[0]));
  std::atomic<int> num_ready{0};
  std::vector<std::string> errors(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      team.UseDeviceOf(0);
      Calls calls(s, team, 0);
      for (num_ready.fetch_add(1); num_ready.load() < kThreads;) std::this_thread::yield();
      for (int round = 0; round < kRounds; ++round) {
        calls.Plan(arrays[i]);
        calls.Dispatch(arrays[i], 0);
        calls.Combine(arrays[i], 0);
      }
      if (calls.error() != nullptr) errors[i] = calls.error();
    });
  }
  for (std::thread& thread : threads) thread.join();
  team.SynchronizeOrDie();
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  ExpectNoFailure(team);
  for (const DeviceArrays& d : arrays) {
    ExpectPlan(d, host[0]);
    ExpectDispatch(d, host[0], 0);
    ExpectCombine(d, host[0], 0);
  }
}

template <typename Function>
Function* DriverEntry(const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  CheckCuda(cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found),
            name);
  return reinterpret_cast<Function*>(address);
}

// Takes the dynamic shared memory from the last kernel of a rank's plan, so that the driver refuses
// to launch it behind the others; mend() gives it back.
void SpoilLastKernelOfPlan(const Scenario& s, GpuTeam& team, uint32_t r, DeviceArrays& arrays,
                           std::function<void()>* mend) {
  const auto get = DriverEntry<decltype(cuFuncGetAttribute)>("cuFuncGetAttribute");
  const auto set = DriverEntry<decltype(cuFuncSetAttribute)>("cuFuncSetAttribute");
  constexpr auto kAttribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
  team.UseDeviceOf(r);
  cudaGraph_t graph;
  CheckCuda(cudaStreamBeginCapture(team.stream(r), cudaStreamCaptureModeThreadLocal), "capture");
  Calls calls(s, team, r);
  calls.Plan(arrays);
  CheckCuda(cudaStreamEndCapture(team.stream(r), &graph), "capture");
  ASSERT_EQ(calls.error(), nullptr) << calls.error();
  size_t num_nodes = 0;
  CheckCuda(cudaGraphGetNodes(graph, nullptr, &num_nodes), "nodes");
  std::vector<cudaGraphNode_t> nodes(num_nodes);
  CheckCuda(cudaGraphGetNodes(graph, nodes.data(), &num_nodes), "nodes");
  // That on which no other depends.
  for (const cudaGraphNode_t node : nodes) {
    size_t num_dependents = 0;
    CheckCuda(cudaGraphNodeGetDependentNodes(node, nullptr, nullptr, &num_dependents), "nodes");
    if (num_dependents > 0) continue;
    CUDA_KERNEL_NODE_PARAMS params{};
    ASSERT_EQ(DriverEntry<decltype(cuGraphKernelNodeGetParams)>("cuGraphKernelNodeGetParams")(
                  node, &params),
              CUDA_SUCCESS);
    ASSERT_GT(params.sharedMemBytes, 0u);
    int bytes = 0;
    ASSERT_EQ(get(&bytes, kAttribute, params.func), CUDA_SUCCESS);
    ASSERT_EQ(set(params.func, kAttribute, 0), CUDA_SUCCESS);
    *mend = [set, function = params.func, bytes] {
      EXPECT_EQ(set(function, kAttribute, bytes), CUDA_SUCCESS);
    };
  }
  CheckCuda(cudaGraphDestroy(graph), "destroy");
}

// The kernel that ends an operation is not there: the rank fails, all others learn of it long
// before their limit, and the next call is not told that another one runs.
TEST_F(GpuLaunch, AnOperationThatIsLaunchedInPartFailsTheGroupAtOnce) {
  const Scenario s = ScenarioOf(2, 4096, Mode::kHt);
  const uint64_t num_pairs = static_cast<uint64_t>(s.num_tokens) * s.shape.top_k;
  ASSERT_EQ(gpu::SlicesOf(s.shape, num_pairs).count, 0u) << "a plan of one kernel";
  Team cpu({.shape = s.shape});
  std::mt19937 random(43);
  const std::vector<HostArrays> host = RunOnCpu(s, cpu, random);
  GpuTeam team({.shape = s.shape, .timeout_ns = 60'000'000'000});
  std::vector<DeviceArrays> arrays;
  for (uint32_t r = 0; r < 2; ++r) arrays.push_back(Upload(s, team, r, host[r]));
  std::function<void()> mend;
  SpoilLastKernelOfPlan(s, team, 0, arrays[0], &mend);
  if (HasFailure()) return;
  team.UseDeviceOf(0);
  Calls spoilt(s, team, 0);
  spoilt.Plan(arrays[0]);
  ASSERT_NE(spoilt.error(), nullptr);
  EXPECT_NE(std::string(spoilt.error()).find("FillRecvSrc"), std::string::npos) << spoilt.error();
  static_cast<void>(cudaGetLastError());
  team.UseDeviceOf(1);
  Calls other(s, team, 1);
  other.Plan(arrays[1]);  // on the same device it is spoilt as well
  other.Dispatch(arrays[1], 0);
  team.SynchronizeOrDie();
  uint32_t busy = 1;
  CheckCuda(cudaMemcpy(&busy,
                       team.heap(0) + gpu::GpuHeapLayout::Make(s.shape).control +
                           offsetof(gpu::Control, busy),
                       sizeof(busy), cudaMemcpyDeviceToHost),
            "control");
  EXPECT_EQ(busy, 0u);
  team.UseDeviceOf(0);
  Calls next(s, team, 0);
  next.Dispatch(arrays[0], 0);
  team.SynchronizeOrDie();
  EXPECT_EQ(next.error(), nullptr) << next.error();
  EXPECT_EQ(team.status(0).kind, static_cast<uint32_t>(gpu::FailureKind::kNotLaunched));
  const auto kind = static_cast<gpu::FailureKind>(team.status(1).kind);
  EXPECT_TRUE(kind == gpu::FailureKind::kPeerFailed ||
              (other.error() != nullptr && kind == gpu::FailureKind::kNotLaunched))
      << team.status(1).kind;
  for (uint32_t r = 0; r < 2; ++r) {
    for (const std::byte value : arrays[r].recv_x[0].Download()) ASSERT_EQ(value, std::byte{0xff});
  }
  team.UseDeviceOf(0);
  mend();
  GpuTeam fresh({.shape = s.shape, .timeout_ns = 5'000'000'000});
  ExpectRight(s, fresh);
}

// Not when the first call is made, by a proxy that cannot read the command.
TEST_F(GpuLaunch, WeightsThatNoCommandTakesAreRefusedWhenARankIsCreated) {
  GroupShape shape = ScenarioOf(2, 8, Mode::kHt).shape;
  shape.node_size = 1;
  shape.top_k = 8;
  shape.max_tokens = uint64_t{1} << 19;  // weights of 16 MiB
  const gpu::NetworkConfig network{.num_rings = 1};
  const gpu::RankConfig config{.shape = shape, .network = &network};
  gpu::RankHandle* handle = nullptr;
  const char* error = jax_ep_gpu_api()->create(&config, &handle);
  ASSERT_NE(error, nullptr);
  EXPECT_NE(std::string(error).find("max_tokens * top_k = 4194304, between nodes at most 4194300"),
            std::string::npos)
      << error;
}

}  // namespace
}  // namespace jax_ep::testing
