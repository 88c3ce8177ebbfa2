// A rank that stands still between two kernels of a call, or before the first, as one whose process
// is stopped does. The others give up, leave, and use their arrays for something else; then it goes
// on. What it makes of the call is right, or the call fails and says so: nothing in between.
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>

#include "kernels/gpu/protocol/device_rank.h"
#include "tests/kernels_gpu/push_scenario.h"

namespace jax_ep::testing {
namespace {

// The kernels that `launch` enqueues on a rank's stream, and a wait for the host before kernel
// `position` of them.
class HeldCall {
 public:
  HeldCall(GpuTeam& team, uint32_t rank, const std::function<void()>& launch, size_t position)
      : team_(team), rank_(rank) {
    team.UseDeviceOf(rank);
    CheckCuda(cudaStreamBeginCapture(team.stream(rank), cudaStreamCaptureModeThreadLocal),
              "capture");
    launch();
    CheckCuda(cudaStreamEndCapture(team.stream(rank), &graph_), "capture");
    CheckCuda(cudaGraphGetNodes(graph_, nullptr, &num_kernels_), "nodes");
    if (position >= num_kernels_) return;
    std::vector<cudaGraphNode_t> kernels(num_kernels_);  // in the order of the stream
    CheckCuda(cudaGraphGetNodes(graph_, kernels.data(), &num_kernels_), "nodes");
    cudaHostNodeParams params{};
    params.fn = [](void* future) {
      // Far longer than any test: only that a mistake ends.
      static_cast<std::shared_future<void>*>(future)->wait_for(std::chrono::seconds(20));
    };
    params.userData = &future_;
    cudaGraphNode_t wait = nullptr;
    if (position > 0) ChangeEdge(kernels[position - 1], kernels[position], false);
    CheckCuda(cudaGraphAddHostNode(&wait, graph_, position > 0 ? &kernels[position - 1] : nullptr,
                                   position > 0 ? 1 : 0, &params),
              "wait");
    ChangeEdge(wait, kernels[position], true);
    CheckCuda(cudaGraphInstantiate(&exec_, graph_, 0), "instantiate");
  }
  ~HeldCall() {
    if (exec_ != nullptr) {
      LetGo();
      CheckCuda(cudaGraphExecDestroy(exec_), "destroy");
    }
    CheckCuda(cudaGraphDestroy(graph_), "destroy");
  }
  HeldCall(const HeldCall&) = delete;
  HeldCall& operator=(const HeldCall&) = delete;

  size_t num_kernels() const { return num_kernels_; }
  void Launch() {
    team_.UseDeviceOf(rank_);
    CheckCuda(cudaGraphLaunch(exec_, team_.stream(rank_)), "launch");
  }
  // And waits for the end of the call.
  void LetGo() {
    if (!is_held_) return;
    is_held_ = false;
    promise_.set_value();
    CheckCuda(cudaStreamSynchronize(team_.stream(rank_)), "synchronize");
  }

 private:
  void ChangeEdge(cudaGraphNode_t from, cudaGraphNode_t to, bool adds) {
    const auto change = [&](auto... data) {
      return adds ? cudaGraphAddDependencies(graph_, &from, &to, data..., 1)
                  : cudaGraphRemoveDependencies(graph_, &from, &to, data..., 1);
    };
#if CUDART_VERSION >= 13000
    CheckCuda(change(static_cast<const cudaGraphEdgeData*>(nullptr)), "edge");
#else
    CheckCuda(change(), "edge");
#endif
  }

  GpuTeam& team_;
  uint32_t rank_;
  bool is_held_ = true;
  std::promise<void> promise_;
  std::shared_future<void> future_ = promise_.get_future().share();
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  size_t num_kernels_ = 0;
};

using Launch = std::function<void(Calls& calls, DeviceArrays& arrays, int32_t* epoch)>;

// A call of rank 0 that is held, with what comes before and, on the other ranks, after it.
struct HeldCase {
  std::string name;
  Mode mode;
  Launch before, call, after;
  std::function<void(const DeviceArrays&, const HostArrays&)> expect_right;
  std::function<const DeviceArray<std::byte>*(const DeviceArrays&)> rows;  // poisoned by a failure
};

HeldCase DispatchCase(int number) {
  const Launch call = [=](Calls& calls, DeviceArrays& a, int32_t*) { calls.Dispatch(a, number); };
  return {"Dispatch" + std::to_string(number),
          Mode::kHt,
          [](Calls& calls, DeviceArrays& a, int32_t*) { calls.Plan(a); },
          call,
          call,
          [=](const DeviceArrays& a, const HostArrays& host) { ExpectDispatch(a, host, number); },
          [=](const DeviceArrays& a) { return &a.recv_x[number]; }};
}

HeldCase CombineCase(Mode mode, int number = 0) {
  const Launch call = [=](Calls& calls, DeviceArrays& a, int32_t*) { calls.Combine(a, number); };
  return {(mode == Mode::kHt ? "Combine" : "LlCombine") + std::to_string(number),
          mode,
          [](Calls& calls, DeviceArrays& a, int32_t*) { calls.Plan(a); },
          call,
          call,
          [=](const DeviceArrays& a, const HostArrays& host) { ExpectCombine(a, host, number); },
          [=](const DeviceArrays& a) { return number == 0 ? &a.out[0] : nullptr; }};
}

std::vector<HeldCase> AllCases() {
  std::vector<HeldCase> cases;
  const Launch plan = [](Calls& calls, DeviceArrays& a, int32_t*) { calls.Plan(a); };
  cases.push_back({"Plan", Mode::kHt, [](Calls&, DeviceArrays&, int32_t*) {}, plan, plan,
                   [](const DeviceArrays& a, const HostArrays& host) { ExpectPlan(a, host); },
                   [](const DeviceArrays&) { return nullptr; }});
  cases.push_back(DispatchCase(0));
  cases.push_back(DispatchCase(2));
  cases.push_back(CombineCase(Mode::kHt));
  cases.push_back(CombineCase(Mode::kHt, 2));  // scalars alone: two kernels
  cases.push_back(CombineCase(Mode::kLl));
  HeldCase done = CombineCase(Mode::kLl);
  done.name += "Done";
  done.before = [](Calls& calls, DeviceArrays& a, int32_t* epoch) {
    calls.Plan(a);
    calls.CombineStart(a, 0, epoch);
  };
  done.call = [](Calls& calls, DeviceArrays& a, int32_t* epoch) { calls.CombineDone(a, 0, epoch); };
  done.after = [](Calls& calls, DeviceArrays& a, int32_t*) {
    for (int i = 0; i < 3; ++i) calls.Combine(a, 0);
  };
  cases.push_back(done);
  done = DispatchCase(0);
  done.name = "LlDispatchDone";
  done.mode = Mode::kLl;
  done.before = [](Calls& calls, DeviceArrays& a, int32_t* epoch) {
    calls.LlDispatchStart(a, epoch);
  };
  done.call = [](Calls& calls, DeviceArrays& a, int32_t* epoch) { calls.LlDispatchDone(a, epoch); };
  done.after = [](Calls& calls, DeviceArrays& a, int32_t*) {
    for (int i = 0; i < 3; ++i) calls.LlDispatch(a);
  };
  cases.push_back(done);
  return cases;
}

class GpuHeld : public ::testing::Test {
 protected:
  static constexpr int64_t kTokens = 16;

  void SetUp() override {
    if (NumDevices() == 0) GTEST_SKIP() << "no CUDA device";
  }

  void Prepare(const HeldCase& held_case, GpuTeamOptions options, uint32_t num_ranks) {
    GroupShape shape;
    shape.num_ranks = num_ranks;
    shape.node_size = 2;
    shape.num_experts = 8;
    shape.top_k = 2;
    shape.align = 4;
    shape.hidden = 64;
    shape.max_tokens = shape.ll_tokens = kTokens;
    shape.elem_type = ElemType::kF32;
    shape.depth = 2;
    options.shape = shape;
    options.max_sms = 8;
    options.timeout_ns = 250'000'000;
    options.arena_bytes = uint64_t{16} << 20;
    s_ = {.shape = shape, .mode = held_case.mode, .num_tokens = kTokens};
    s_.recv_rows = WorstRecvRows(shape, s_.layout, kTokens);
    Team cpu({.shape = shape});
    std::mt19937 random(3);
    host_ = RunOnCpu(s_, cpu, random);
    arrays_.clear();
    epochs_.clear();
    team_ = std::make_unique<GpuTeam>(options);
    for (uint32_t r = 0; r < num_ranks; ++r) {
      arrays_.push_back(Upload(s_, *team_, r, host_[r]));
      epochs_.push_back(DeviceArray<int32_t>::Output(*team_, r, 1));
    }
    for (uint32_t r = 0; r < num_ranks; ++r) Enqueue(r, held_case.before);
    team_->Synchronize();
    ExpectNoFailure(*team_);
  }
  void Enqueue(uint32_t r, const Launch& launch) {
    team_->UseDeviceOf(r);
    Calls calls(s_, *team_, r);
    launch(calls, arrays_[r], epochs_[r].data());
    EXPECT_EQ(calls.error(), nullptr) << calls.error();
  }
  std::unique_ptr<HeldCall> Hold(const HeldCase& held_case, size_t position) {
    return std::make_unique<HeldCall>(*team_, 0, [&] { Enqueue(0, held_case.call); }, position);
  }
  // What XLA does with arrays of a call that has ended.
  void ReuseArrays(uint32_t r) {
    team_->UseDeviceOf(r);
    constexpr int kSomething = 0x41;  // finite in every type
    for (const auto& array : {arrays_[r].x, arrays_[r].y}) {
      CheckCuda(
          cudaMemsetAsync(array.data(), kSomething, array.span().size_bytes(), team_->stream(r)),
          "reuse");
    }
    CheckCuda(cudaMemsetAsync(arrays_[r].weights.data(), kSomething,
                              arrays_[r].weights.span().size_bytes(), team_->stream(r)),
              "reuse");
  }
  void ExpectRightOrFailed(const HeldCase& held_case) {
    if (team_->status(0).failed.load() == 0) {
      held_case.expect_right(arrays_[0], host_[0]);
      return;
    }
    const DeviceArray<std::byte>* rows = held_case.rows(arrays_[0]);
    if (rows == nullptr) return;
    for (const std::byte value : rows->Download()) ASSERT_EQ(value, std::byte{0xff});
  }

  // Every position of the call.
  void RunCase(const HeldCase& held_case, const GpuTeamOptions& options, uint32_t num_ranks) {
    size_t num_kernels = 1;
    for (size_t position = 0; position < num_kernels && !HasFailure(); ++position) {
      SCOPED_TRACE(held_case.name + ", held before kernel " + std::to_string(position) +
                   (options.in_place ? "" : ", staged") + (options.use_tma ? "" : ", plain"));
      Prepare(held_case, options, num_ranks);
      if (HasFailure()) return;
      const auto held = Hold(held_case, position);
      num_kernels = held->num_kernels();
      held->Launch();
      for (uint32_t r = 1; r < num_ranks; ++r) Enqueue(r, held_case.call);
      for (uint32_t r = 1; r < num_ranks; ++r) {
        CheckCuda(cudaStreamSynchronize(team_->stream(r)), "synchronize");
      }
      for (uint32_t r = 1; r < num_ranks; ++r) {
        ReuseArrays(r);
        Enqueue(r, held_case.after);
      }
      for (uint32_t r = 1; r < num_ranks; ++r) {
        CheckCuda(cudaStreamSynchronize(team_->stream(r)), "synchronize");
      }
      held->LetGo();
      ExpectRightOrFailed(held_case);
    }
  }

  Scenario s_;
  std::vector<HostArrays> host_;
  std::unique_ptr<GpuTeam> team_;
  std::vector<DeviceArrays> arrays_;
  std::vector<DeviceArray<int32_t>> epochs_;
};

TEST_F(GpuHeld, InsideANodeTheResultIsRightOrTheCallFails) {
  for (const bool use_tma : {true, false}) {
    for (const HeldCase& held_case : AllCases()) RunCase(held_case, {.use_tma = use_tma}, 2);
  }
}

TEST_F(GpuHeld, WithStagedArraysTheResultIsRightOrTheCallFails) {
  for (const int number : {0, 2}) RunCase(DispatchCase(number), {.in_place = false}, 2);
}

TEST_F(GpuHeld, BetweenNodesTheResultIsRightOrTheCallFails) {
  RunCase(DispatchCase(0), {}, 4);
  RunCase(CombineCase(Mode::kHt), {}, 4);
}

// The shortest way there: the source is through with everything but the wait, its flag says so, and
// then it gives up. A rank can be held between its entry and its reads where they are two kernels:
// where it stages arrays.
TEST_F(GpuHeld, ASourceThatGaveUpBehindItsTailFlagIsNotBelieved) {
  const HeldCase held_case = DispatchCase(0);
  Prepare(held_case, {.in_place = false}, 2);
  const auto held = Hold(held_case, 1);
  ASSERT_EQ(held->num_kernels(), 2u);
  held->Launch();
  Enqueue(1, held_case.call);
  const uint64_t flag =
      gpu::GpuHeapLayout::Make(s_.shape).tail_flags + 1 * sizeof(uint64_t);  // of rank 1
  const uint64_t wanted =
      gpu::FlagValue(2, gpu::Operation::kDispatch,  // after the plan
                     gpu::FingerprintOf(gpu::Operation::kDispatch, s_.shape, /*program=*/0, s_.mode,
                                        s_.layout, s_.num_tokens, s_.recv_rows));
  uint64_t seen = 0;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (seen != wanted && std::chrono::steady_clock::now() < deadline) {
    CheckCuda(cudaMemcpy(&seen, team_->heap(0) + flag, sizeof(seen), cudaMemcpyDeviceToHost),
              "flag");
  }
  ASSERT_EQ(seen, wanted);
  team_->status(1).abort.store(1);
  CheckCuda(cudaStreamSynchronize(team_->stream(1)), "synchronize");
  ReuseArrays(1);
  Enqueue(1, held_case.after);
  CheckCuda(cudaStreamSynchronize(team_->stream(1)), "synchronize");
  held->LetGo();
  ExpectRightOrFailed(held_case);
  EXPECT_EQ(team_->status(0).failed.load(), 1u);
  EXPECT_EQ(team_->status(0).peer, 1u);
}

}  // namespace
}  // namespace jax_ep::testing
