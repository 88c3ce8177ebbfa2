// Mode ll on GPUs, whole and in halves: bit for bit what the CPU kernels (which are
// checked against the oracle) make of the same inputs, in any order of halves, with ranks that are
// late, under graph replay; and what must fail does.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "kernels/gpu/protocol/device_rank.h"
#include "tests/kernels_gpu/push_scenario.h"

namespace jax_ep::testing {
namespace {

class GpuPush : public ::testing::Test {
 protected:
  void SetUp() override {
    if (NumDevices() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_F(GpuPush, RandomScenariosGiveTheBitsOfTheCpu) {
  const uint32_t num_seeds = NumSeeds(60);
  for (uint32_t seed = 0; seed < num_seeds && !HasFailure(); ++seed) {
    std::mt19937 random(seed + 1000);
    GroupShape shape;
    shape.num_ranks = Pick<uint32_t>(random, {1, 2, 3, 4, 4, 6, 8, 12});
    shape.node_size = DrawNodeSize(shape.num_ranks, random);
    shape.num_experts = shape.num_ranks * Pick<uint32_t>(random, {1, 3, 4, 40});
    shape.top_k = std::min(Pick<uint32_t>(random, {1, 2, 6, 8, 8, 64}), shape.num_experts);
    shape.align = Pick<uint32_t>(random, {1, 4, 24});
    shape.elem_type = Pick(random, {ElemType::kF32, ElemType::kBf16, ElemType::kF16});
    shape.hidden = Pick<uint64_t>(random, {8, 136, 513, 1024, 7168});
    shape.max_tokens = Pick<uint64_t>(random, {1, 5, 20, 34, 130, 300});
    if (shape.hidden > 1000 && shape.top_k * shape.max_tokens > 1000) shape.max_tokens = 20;
    if (shape.num_experts * shape.max_tokens * shape.hidden > 10'000'000) shape.max_tokens = 3;
    ShrinkIfAsked(shape);
    shape.ll_tokens = shape.max_tokens;
    shape.f32_partials = random() % 2 == 0;
    shape.depth = Pick<uint32_t>(random, {1, 2, 2, 3});
    // Between nodes; so that most calls have several rounds.
    constexpr uint64_t kRoundTokens[] = {3, 16, 32, 70};
    if (seed / 2 % 3 == 0) shape.round_tokens = kRoundTokens[seed / 6 % 4];
    GpuTeamOptions options{.shape = shape};
    options.in_place = random() % 4 != 0;
    options.use_tma = random() % 3 != 0;
    options.max_sms = Pick<uint32_t>(random, {3, 16, 24});
    if (shape.num_ranks > 4) options.max_sms = 3;
    options.max_sms = SmsThatFit(options.max_sms, shape.num_ranks);
    if (random() % 4 == 0) options.plain_ranks = 0b0101'0101'0101;
    options.arena_bytes = uint64_t{2} << 30;
    options.num_rings = Pick<uint32_t>(random, {1, 1, 2});
    options.operations_before = OperationsBefore(seed);
    options.has_device_stages = seed % 2 == 0;
    const bool is_view = seed % 3 == 1;  // calls are smaller than the group
    if (is_view) options.shape = ShapeWithMoreRoom(shape);
    Team cpu({.shape = shape}), whole_cpu({.shape = options.shape});
    GpuTeam team(options);
    for (int round = 0; round < 3 && !HasFailure(); ++round) {
      SCOPED_TRACE("seed " + std::to_string(seed) + (options.in_place ? "" : " staged") +
                   (is_view ? " view" : ""));
      const bool is_whole = is_view && round == 1;  // between two calls of the view
      Scenario s{.shape = is_whole ? options.shape : shape};
      s.mode = random() % 3 == 0 ? Mode::kHt : Mode::kLl;
      s.layout = Pick(random, {Layout::kExpertMajor, Layout::kExpertBatched, Layout::kExpertBatched,
                               Layout::kRankMajor});
      s.num_tokens =
          static_cast<int64_t>(round == 0 ? shape.max_tokens : random() % (shape.max_tokens + 1));
      s.draw = Pick(random, {Draw::kUniform, Draw::kZipf, Draw::kOneExpert, Draw::kIdleRank,
                             Draw::kMessy, Draw::kMessy});
      s.recv_rows = DrawRecvRows(s, random);
      if (random() % 5 == 0) s.misalignment = ElemBytes(shape.elem_type);
      RunPushScenario(s, is_whole ? whole_cpu : cpu, team, random);
    }
  }
}

GroupShape SmallShape() {
  GroupShape shape;
  shape.num_ranks = shape.node_size = 4;
  shape.num_experts = 32;
  shape.top_k = 4;
  shape.align = 4;
  shape.hidden = 256;
  shape.max_tokens = shape.ll_tokens = 64;
  shape.elem_type = ElemType::kBf16;
  return shape;
}

// One graph per rank with whole calls and halves, replayed while the routing changes: sets and
// epochs are found on the device.
TEST_F(GpuPush, GraphReplaysFollowTheirInputs) {
  for (const auto& [mode, node_size] :
       {std::pair(Mode::kLl, 4u), std::pair(Mode::kHt, 4u), std::pair(Mode::kLl, 2u)}) {
    Scenario s{.shape = SmallShape(), .mode = mode, .layout = Layout::kExpertBatched};
    s.shape.depth = 3;
    s.shape.node_size = node_size;
    s.shape.round_tokens = 24;  // between nodes
    s.num_tokens = 64;
    s.recv_rows = WorstRecvRows(s.shape, s.layout, s.num_tokens);
    Team cpu({.shape = s.shape});
    GpuTeam team({.shape = s.shape, .arena_bytes = uint64_t{1} << 30});
    std::mt19937 random(9);
    std::vector<HostArrays> host = RunOnCpu(s, cpu, random);
    std::vector<DeviceArrays> whole, planned, halves, from;
    std::vector<DeviceArray<int32_t>> epochs;
    std::vector<cudaGraphExec_t> graphs(4);
    for (uint32_t r = 0; r < 4; ++r) {
      for (auto* arrays : {&whole, &planned, &halves, &from}) {
        arrays->push_back(Upload(s, team, r, host[r]));
      }
      epochs.push_back(DeviceArray<int32_t>::Output(team, r, 2));
      CheckCuda(cudaDeviceSynchronize(), "upload");
      cudaGraph_t graph;
      CheckCuda(cudaStreamBeginCapture(team.stream(r), cudaStreamCaptureModeThreadLocal),
                "capture");
      Calls calls(s, team, r);
      RunWhole(s, calls, whole[r], planned[r]);
      RunHalves(s, calls, from[r], halves[r], epochs[r].data(), /*ends_in_order=*/false);
      CheckCuda(cudaStreamEndCapture(team.stream(r), &graph), "capture");
      ASSERT_EQ(calls.error(), nullptr) << calls.error();
      CheckCuda(cudaGraphInstantiate(&graphs[r], graph, 0), "instantiate");
      CheckCuda(cudaGraphDestroy(graph), "destroy");
    }
    for (int round = 0; round < 40 && !HasFailure(); ++round) {
      SCOPED_TRACE("round " + std::to_string(round));
      s.draw = round % 2 == 0 ? Draw::kMessy : Draw::kZipf;
      if (round % 4 == 0) host = RunOnCpu(s, cpu, random);
      for (uint32_t r = 0; r < 4; ++r) {
        Refresh(team, r, whole[r], host[r]);
        Refresh(team, r, planned[r], host[r]);
        Refresh(team, r, halves[r], host[r]);
        Refresh(team, r, from[r], host[r]);
      }
      for (uint32_t r = 0; r < 4; ++r) {
        team.UseDeviceOf(r);
        CheckCuda(cudaGraphLaunch(graphs[r], team.stream(r)), "launch");
      }
      team.Synchronize();
      ExpectNoFailure(team);
      if (round % 4 != 0) continue;
      for (uint32_t r = 0; r < 4 && !HasFailure(); ++r) {
        ExpectPlan(whole[r], host[r]);
        ExpectDispatch(whole[r], host[r], 0);
        for (int i = 0; i < HostArrays::kCombines; ++i) ExpectCombine(whole[r], host[r], i);
        if (!HasHalves(s)) continue;
        ExpectDispatch(halves[r], host[r], 0);
        for (int i = 0; i < HostArrays::kCombines; ++i) ExpectCombine(halves[r], host[r], i);
      }
    }
    for (cudaGraphExec_t graph : graphs) CheckCuda(cudaGraphExecDestroy(graph), "destroy");
  }
}

// Many whole calls one behind the other while ranks are late in turn: a set is not written before
// all have read its last use. Each call has inputs of its own.
TEST_F(GpuPush, LateRanksKeepTheirSets) {
  for (const uint32_t depth : {1u, 2u}) {
    Scenario s{.shape = SmallShape(), .layout = Layout::kExpertBatched};
    s.shape.depth = depth;
    s.num_tokens = 64;
    s.recv_rows = WorstRecvRows(s.shape, s.layout, s.num_tokens);
    Team cpu({.shape = s.shape});
    GpuTeam team({.shape = s.shape, .arena_bytes = uint64_t{2} << 30});
    std::mt19937 random(3);
    constexpr int kCalls = 12;
    std::vector<std::vector<HostArrays>> host;
    std::vector<std::vector<DeviceArrays>> device(kCalls);
    for (int call = 0; call < kCalls; ++call) {
      host.push_back(RunOnCpu(s, cpu, random));
      for (uint32_t r = 0; r < 4; ++r) {
        device[call].push_back(Upload(s, team, r, host[call][r]));
      }
    }
    const std::string error = team.Run([&](uint32_t r) -> const char* {
      static thread_local std::string text;
      Calls calls(s, team, r);
      for (int call = 0; call < kCalls; ++call) {
        if (call % 4 == static_cast<int>(r)) Delay(team, r);
        calls.LlDispatch(device[call][r]);
        if (call % 3 == static_cast<int>(r)) Delay(team, r);
        calls.Combine(device[call][r], 0);
      }
      if (calls.error() == nullptr) return nullptr;
      text = calls.error();
      return text.c_str();
    });
    ASSERT_EQ(error, "");
    ExpectNoFailure(team);
    for (int call = 0; call < kCalls && !HasFailure(); ++call) {
      for (uint32_t r = 0; r < 4; ++r) {
        ExpectPlan(device[call][r], host[call][r]);
        ExpectDispatch(device[call][r], host[call][r], 0);
        ExpectCombine(device[call][r], host[call][r], 0);
      }
    }
  }
}

// What must fail, on a small group with a short limit.
class GpuPushFailure : public GpuPush {
 protected:
  void SetUp() override {
    GpuPush::SetUp();
    if (IsSkipped()) return;
    s_.shape = SmallShape();
    s_.shape.elem_type = ElemType::kF32;
    Adjust(s_.shape);
    s_.layout = Layout::kExpertBatched;
    s_.num_tokens = 64;
    s_.recv_rows = WorstRecvRows(s_.shape, s_.layout, s_.num_tokens);
    team_ = std::make_unique<GpuTeam>(GpuTeamOptions{
        .shape = s_.shape, .timeout_ns = 300'000'000, .arena_bytes = uint64_t{1} << 30});
    Team cpu({.shape = s_.shape});
    std::mt19937 random(1);
    const std::vector<HostArrays> host = RunOnCpu(s_, cpu, random);
    for (uint32_t r = 0; r < 4; ++r) {
      arrays_.push_back(Upload(s_, *team_, r, host[r]));
      epochs_.push_back(DeviceArray<int32_t>::Output(*team_, r, 4));
    }
  }

  virtual void Adjust(GroupShape& /*shape*/) {}

  void Run(const std::function<void(uint32_t rank, Calls& calls)>& body) {
    const std::string error = team_->Run([&](uint32_t r) -> const char* {
      static thread_local std::string text;
      Calls calls(s_, *team_, r);
      body(r, calls);
      if (calls.error() == nullptr) return nullptr;
      text = calls.error();
      return text.c_str();
    });
    ASSERT_EQ(error, "");
  }

  void ExpectKind(uint32_t r, std::initializer_list<gpu::FailureKind> kinds) {
    const gpu::RankStatus& status = team_->status(r);
    EXPECT_EQ(status.failed.load(), 1u) << "rank " << r;
    const auto kind = static_cast<gpu::FailureKind>(status.kind);
    EXPECT_TRUE(std::find(kinds.begin(), kinds.end(), kind) != kinds.end())
        << "rank " << r << " kind " << status.kind << " peer " << status.peer;
  }
  void ExpectPoisonedDispatch(uint32_t r) {
    ExpectBytes(arrays_[r].recv_x[0]);
    for (const float weight : arrays_[r].recv_weights[0].Download()) {
      ASSERT_TRUE(std::isnan(weight));
    }
    for (const int32_t src : arrays_[r].recv_src.Download()) ASSERT_EQ(src, -1);
    for (const int32_t slot : arrays_[r].send_slot.Download()) ASSERT_EQ(slot, -1);
    for (const int32_t size : arrays_[r].group_sizes.Download()) ASSERT_EQ(size, 0);
  }
  static void ExpectBytes(const DeviceArray<std::byte>& array) {
    for (const std::byte value : array.Download()) ASSERT_EQ(value, std::byte{0xff});
    EXPECT_TRUE(array.HasCanary());
  }

  Scenario s_;
  std::unique_ptr<GpuTeam> team_;
  std::vector<DeviceArrays> arrays_;
  std::vector<DeviceArray<int32_t>> epochs_;
};

using enum gpu::FailureKind;

TEST_F(GpuPushFailure, ARankThatDoesNotComePoisonsLlDispatch) {
  Run([&](uint32_t r, Calls& calls) {
    if (r != 1) calls.LlDispatch(arrays_[r]);
  });
  for (const uint32_t r : {0u, 2u, 3u}) {
    ExpectKind(r, {kTimeout, kPeerFailed});
    ExpectPoisonedDispatch(r);
  }
  Run([&](uint32_t r, Calls& calls) { calls.LlDispatch(arrays_[r]); });
  ExpectKind(1, {kPeerFailed, kTimeout});
  ExpectPoisonedDispatch(1);
}

TEST_F(GpuPushFailure, ARankThatDoesNotComePoisonsLlCombine) {
  Run([&](uint32_t r, Calls& calls) { calls.LlDispatch(arrays_[r]); });
  Run([&](uint32_t r, Calls& calls) {
    if (r != 2) calls.Combine(arrays_[r], 0);
  });
  for (const uint32_t r : {0u, 1u, 3u}) {
    ExpectKind(r, {kTimeout, kPeerFailed});
    ExpectBytes(arrays_[r].out[0]);
  }
}

TEST_F(GpuPushFailure, RanksInDifferentOperationsAreFound) {
  Run([&](uint32_t r, Calls& calls) { calls.LlDispatch(arrays_[r]); });
  Run([&](uint32_t r, Calls& calls) {
    r == 3 ? calls.LlDispatchStart(arrays_[r], epochs_[r].data()) : calls.LlDispatch(arrays_[r]);
  });
  for (const uint32_t r : {0u, 1u, 2u}) {
    ExpectKind(r, {kWrongOrder, kPeerFailed});
    ExpectPoisonedDispatch(r);
  }
}

// Flags of a set that a newer call has written already: what they announce is not what is waited
// for.
TEST_F(GpuPushFailure, NewerFlagsOfASetAreNotTaken) {
  Run([&](uint32_t r, Calls& calls) { calls.Plan(arrays_[r]); });
  const gpu::PushArea area = gpu::GpuHeapLayout::Make(s_.shape).ll_combine;
  const auto forge = [&](const HeapArea& flags) {
    constexpr uint64_t kNewer = 9;
    const std::vector<uint64_t> words(flags.set_stride * s_.shape.depth / sizeof(uint64_t),
                                      gpu::FlagValue(kNewer, gpu::Operation::kLlCombine, 0));
    CheckCuda(cudaMemcpy(team_->heap(0) + flags.offset, words.data(),
                         words.size() * sizeof(uint64_t), cudaMemcpyHostToDevice),
              "forge");
  };
  forge(area.flags);
  forge(area.meta_flags);
  Run([&](uint32_t r, Calls& calls) {
    if (r == 0) calls.Combine(arrays_[r], 0);
  });
  ExpectKind(0, {kWrongOrder});
  ExpectBytes(arrays_[0].out[0]);
}

TEST_F(GpuPushFailure, AnAbortEndsAllWaits) {
  team_->status(0).abort.store(1);
  Run([&](uint32_t r, Calls& calls) {
    if (r != 2) calls.LlDispatch(arrays_[r]);
  });
  ExpectKind(0, {kAborted});
  for (const uint32_t r : {1u, 3u}) ExpectKind(r, {kPeerFailed});
  for (const uint32_t r : {0u, 1u, 3u}) ExpectPoisonedDispatch(r);
}

TEST_F(GpuPushFailure, OneMoreStartThanSetsFailsAtOnce) {
  Run([&](uint32_t r, Calls& calls) {
    calls.Plan(arrays_[r]);
    for (uint32_t i = 0; i <= s_.shape.depth; ++i) {
      calls.CombineStart(arrays_[r], 0, epochs_[r].data() + i);
    }
    for (uint32_t i = 0; i <= s_.shape.depth; ++i) {
      calls.CombineDone(arrays_[r], 0, epochs_[r].data() + i);
    }
  });
  for (uint32_t r = 0; r < 4; ++r) {
    ExpectKind(r, {kTooManyOpen, kPeerFailed});
    ExpectBytes(arrays_[r].out[0]);
  }
}

TEST_F(GpuPushFailure, ASecondDoneOfOneStartFails) {
  Run([&](uint32_t r, Calls& calls) {
    calls.LlDispatchStart(arrays_[r], epochs_[r].data());
    calls.LlDispatchDone(arrays_[r], epochs_[r].data());
  });
  ExpectNoFailure(*team_);
  Run([&](uint32_t r, Calls& calls) { calls.LlDispatchDone(arrays_[r], epochs_[r].data()); });
  for (uint32_t r = 0; r < 4; ++r) {
    ExpectKind(r, {kStaleEpoch, kPeerFailed});
    ExpectPoisonedDispatch(r);
  }
}

// What an older jax_ep has lowered: nothing is launched, and the group goes on.
TEST_F(GpuPushFailure, HalvesOfModeHtAreRefused) {
  s_.mode = Mode::kHt;
  using Half = std::function<void(Calls & calls, DeviceArrays & arrays, int32_t* epoch)>;
  const std::pair<const char*, Half> halves[] = {
      {"dispatch_start", [](auto& calls, auto& a, auto* e) { calls.DispatchStart(a, 0, e); }},
      {"dispatch_done", [](auto& calls, auto& a, auto* e) { calls.DispatchDone(a, 0, e); }},
      {"combine_start", [](auto& calls, auto& a, auto* e) { calls.CombineStart(a, 0, e); }},
      {"combine_done", [](auto& calls, auto& a, auto* e) { calls.CombineDone(a, 0, e); }}};
  for (const auto& [name, half] : halves) {
    Calls calls(s_, *team_, 0);
    half(calls, arrays_[0], epochs_[0].data());
    ASSERT_NE(calls.error(), nullptr) << name;
    EXPECT_NE(std::string(calls.error()).find(std::string(name) + " (ht): mode ht has no halves"),
              std::string::npos)
        << calls.error();
  }
  Run([&](uint32_t r, Calls& calls) { calls.Plan(arrays_[r]); });
  ExpectNoFailure(*team_);
}

// Calls of several rounds between nodes.
class GpuPushRoundsFailure : public GpuPushFailure {
 protected:
  void Adjust(GroupShape& shape) override {
    shape.node_size = 2;
    shape.round_tokens = 24;
  }
  static constexpr int kLastRound = 48;  // its first token
};

TEST_F(GpuPushRoundsFailure, ARankThatDoesNotComePoisonsLlDispatch) {
  Run([&](uint32_t r, Calls& calls) {
    if (r != 1) calls.LlDispatch(arrays_[r]);
  });
  for (const uint32_t r : {0u, 2u, 3u}) {
    ExpectKind(r, {kTimeout, kPeerFailed});
    ExpectPoisonedDispatch(r);
  }
}

// A plan by which ranks 0 and 2 wait for rows that rank 1 does not send, in the last round.
TEST_F(GpuPushRoundsFailure, TheLastRoundPoisonsAllOfADispatch) {
  Run([&](uint32_t r, Calls& calls) { calls.Plan(arrays_[r]); });
  std::vector<int32_t> slots = arrays_[1].send_slot.Download();
  std::fill(slots.begin() + kLastRound * s_.shape.top_k, slots.end(), -1);
  arrays_[1].send_slot.Upload(slots);
  Run([&](uint32_t r, Calls& calls) { calls.Dispatch(arrays_[r], 0); });
  for (const uint32_t r : {0u, 2u}) {
    ExpectKind(r, {kTimeout, kPeerFailed});
    ExpectBytes(arrays_[r].recv_x[0]);
  }
}
TEST_F(GpuPushRoundsFailure, TheLastRoundPoisonsAllOfACombine) {
  Run([&](uint32_t r, Calls& calls) { calls.LlDispatch(arrays_[r]); });
  ExpectNoFailure(*team_);
  std::vector<int32_t> sources = arrays_[1].recv_src.Download();
  const auto pairs = static_cast<int32_t>(s_.shape.max_tokens * s_.shape.top_k);
  for (int32_t& source : sources) {
    if (source % pairs >= kLastRound * static_cast<int32_t>(s_.shape.top_k)) source = -1;
  }
  arrays_[1].recv_src.Upload(sources);
  Run([&](uint32_t r, Calls& calls) { calls.Combine(arrays_[r], 0); });
  for (const uint32_t r : {0u, 2u}) {
    ExpectKind(r, {kTimeout, kPeerFailed});
    ExpectBytes(arrays_[r].out[0]);
  }
}

// Halves of few tokens hold one set of two while calls in rounds use the other.
TEST_F(GpuPushRoundsFailure, WholeCallsInRoundsRunBetweenHalves) {
  Scenario few = s_;
  few.num_tokens = 20;
  few.recv_rows = WorstRecvRows(few.shape, few.layout, few.num_tokens);
  Team cpu({.shape = few.shape});
  std::mt19937 random(2);
  const std::vector<HostArrays> host = RunOnCpu(few, cpu, random);
  const std::vector<HostArrays> host_of_many = RunOnCpu(s_, cpu, random);
  std::vector<DeviceArrays> halves, many;
  for (uint32_t r = 0; r < 4; ++r) {
    halves.push_back(Upload(few, *team_, r, host[r]));
    many.push_back(Upload(s_, *team_, r, host_of_many[r]));
  }
  Run([&](uint32_t r, Calls& calls) {
    Calls of_few(few, *team_, r);
    of_few.LlDispatchStart(halves[r], epochs_[r].data());
    calls.LlDispatch(many[r]);
    of_few.LlDispatchDone(halves[r], epochs_[r].data());
    of_few.CombineStart(halves[r], 0, epochs_[r].data() + 1);
    calls.Combine(many[r], 0);
    of_few.CombineDone(halves[r], 0, epochs_[r].data() + 1);
    EXPECT_EQ(of_few.error(), nullptr);
  });
  ExpectNoFailure(*team_);
  for (uint32_t r = 0; r < 4 && !HasFailure(); ++r) {
    ExpectDispatch(halves[r], host[r], 0);
    ExpectCombine(halves[r], host[r], 0);
    ExpectPlan(many[r], host_of_many[r]);
    ExpectDispatch(many[r], host_of_many[r], 0);
    ExpectCombine(many[r], host_of_many[r], 0);
  }
}

// What was lowered for a group of another node_size: nothing is launched, and the group goes on.
TEST_F(GpuPushRoundsFailure, HalvesAreRefused) {
  using Half = std::function<void(Calls & calls, DeviceArrays & arrays, int32_t* epoch)>;
  const Half halves[] = {[](auto& calls, auto& a, auto* e) { calls.LlDispatchStart(a, e); },
                         [](auto& calls, auto& a, auto* e) { calls.LlDispatchDone(a, e); },
                         [](auto& calls, auto& a, auto* e) { calls.DispatchStart(a, 0, e); },
                         [](auto& calls, auto& a, auto* e) { calls.DispatchDone(a, 0, e); },
                         [](auto& calls, auto& a, auto* e) { calls.CombineStart(a, 0, e); },
                         [](auto& calls, auto& a, auto* e) { calls.CombineDone(a, 0, e); }};
  for (const Half& half : halves) {
    Calls calls(s_, *team_, 0);
    half(calls, arrays_[0], epochs_[0].data());
    ASSERT_NE(calls.error(), nullptr);
    EXPECT_NE(std::string(calls.error()).find("got a half of 64 tokens, expected at most 24"),
              std::string::npos)
        << calls.error();
  }
  Run([&](uint32_t r, Calls& calls) { calls.LlDispatch(arrays_[r]); });
  ExpectNoFailure(*team_);
}

}  // namespace
}  // namespace jax_ep::testing
