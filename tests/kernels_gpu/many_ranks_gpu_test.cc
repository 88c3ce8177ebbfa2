// Groups of many ranks with one SM and short rows each, so that they fit the GPUs of one machine;
// and groups whose ranks differ. Bit for bit what the CPU makes of the same inputs.
#include <gtest/gtest.h>

#include <tuple>

#include "kernels/gpu/protocol/ht_rounds.h"
#include "tests/kernels_gpu/push_scenario.h"

namespace jax_ep::testing {
namespace {

constexpr int kHalvedCombines = 2;  // of HostArrays::kCombines, those that come in halves

GroupShape ShapeOf(uint32_t num_ranks, uint32_t node_size) {
  GroupShape shape;
  shape.num_ranks = num_ranks;
  shape.node_size = node_size;
  shape.num_experts = 2 * num_ranks;
  shape.top_k = 8;
  shape.align = 4;
  shape.hidden = 64;
  shape.max_tokens = shape.ll_tokens = 12;
  shape.elem_type = ElemType::kBf16;
  return shape;
}

struct Arrays {
  std::vector<HostArrays> host;
  std::vector<DeviceArrays> whole, planned;
};

Arrays Prepare(const Scenario& s, GpuTeam& team, uint32_t seed) {
  Team cpu({.shape = s.shape});
  std::mt19937 random(seed);
  Arrays arrays{.host = RunOnCpu(s, cpu, random), .whole = {}, .planned = {}};
  team.Reset();
  for (uint32_t r = 0; r < team.num_ranks(); ++r) {
    arrays.whole.push_back(Upload(s, team, r, arrays.host[r]));
    arrays.planned.push_back(Upload(s, team, r, arrays.host[r]));
  }
  return arrays;
}

// One call on all ranks, to its end.
template <typename Call>
void Step(const Scenario& s, GpuTeam& team, Call&& call) {
  std::string wrong;
  for (uint32_t r = 0; r < team.num_ranks(); ++r) {
    team.UseDeviceOf(r);
    Calls calls(s, team, r);
    call(r, calls);
    if (calls.error() != nullptr) wrong += calls.error();
  }
  team.SynchronizeOrDie();
  ASSERT_EQ(wrong, "");
  ExpectNoFailure(team);
}

// Calls with all halves of a kind between others: a start waits for no peer, so any number of them
// runs on one GPU, and after the last one no done waits for a kernel.
void RunHalvesApart(const Scenario& s, GpuTeam& team, Arrays& a) {
  std::vector<DeviceArray<int32_t>> epochs;
  for (uint32_t r = 0; r < team.num_ranks(); ++r) {
    epochs.push_back(DeviceArray<int32_t>::Output(team, r, 1));
  }
  Step(s, team,
       [&](uint32_t r, Calls& calls) { calls.LlDispatchStart(a.whole[r], epochs[r].data()); });
  Step(s, team,
       [&](uint32_t r, Calls& calls) { calls.LlDispatchDone(a.whole[r], epochs[r].data()); });
  for (int i = 0; i < kHalvedCombines && !::testing::Test::HasFailure(); ++i) {
    Step(s, team,
         [&](uint32_t r, Calls& calls) { calls.CombineStart(a.whole[r], i, epochs[r].data()); });
    Step(s, team,
         [&](uint32_t r, Calls& calls) { calls.CombineDone(a.whole[r], i, epochs[r].data()); });
  }
}

// Parameters: ranks, ranks of a node.
class GpuManyRanks : public ::testing::TestWithParam<std::tuple<uint32_t, uint32_t>> {
 protected:
  void SetUp() override {
    if (NumDevices() == 0) GTEST_SKIP() << "no CUDA device";
    shape_ = ShapeOf(std::get<0>(GetParam()), std::get<1>(GetParam()));
    options_ = {.shape = shape_,
                .max_sms = 1,
                .timeout_ns = 10'000'000'000,
                .arena_bytes = uint64_t{64} << 20};
  }
  // Calls of several kernels, of which one waits for peers before the last.
  bool FitsCallsOfSeveralKernels() const { return RanksOfAGpu(shape_.num_ranks) <= kStreamsOfAGpu; }
  // Between nodes a rank's LL call waits in a block for each remote rank.
  bool FitsBlocksThatAwaitRemotes() const {
    constexpr uint32_t kBlocksOfAGpu = 512;
    const uint32_t num_remotes = shape_.num_ranks - shape_.node_size;
    return RanksOfAGpu(shape_.num_ranks) * num_remotes <= kBlocksOfAGpu;
  }

  // Calls of max_tokens, one after the other.
  void RunHt();
  void RunLl();

  GroupShape shape_;
  GpuTeamOptions options_;
};

void GpuManyRanks::RunLl() {
  if (shape_.num_nodes() > 1 && !(FitsCallsOfSeveralKernels() && FitsBlocksThatAwaitRemotes())) {
    GTEST_SKIP() << shape_.num_ranks << " ranks need more GPUs";
  }
  GpuTeam team(options_);
  std::vector<uint64_t> num_calls(team.num_ranks()), num_rows(team.num_ranks());
  for (const Layout layout : {Layout::kExpertMajor, Layout::kExpertBatched, Layout::kRankMajor}) {
    Scenario s{.shape = shape_, .mode = Mode::kLl, .layout = layout, .num_tokens = 12};
    s.recv_rows = WorstRecvRows(shape_, layout, s.num_tokens);
    SCOPED_TRACE(s.Name());
    Arrays a = Prepare(s, team, 21);
    Step(s, team, [&](uint32_t r, Calls& calls) { calls.LlDispatch(a.whole[r]); });
    for (int i = 0; i < HostArrays::kCombines && !HasFailure(); ++i) {
      Step(s, team, [&](uint32_t r, Calls& calls) { calls.Combine(a.whole[r], i); });
    }
    for (uint32_t r = 0; r < team.num_ranks() && !HasFailure(); ++r) {
      SCOPED_TRACE("rank " + std::to_string(r));
      ExpectPlan(a.whole[r], a.host[r]);
      ExpectDispatch(a.whole[r], a.host[r], 0);
      for (int i = 0; i < HostArrays::kCombines; ++i) ExpectCombine(a.whole[r], a.host[r], i);
      ++num_calls[r];
      for (const int32_t source : a.host[r].recv_src) num_rows[r] += source >= 0 ? 1 : 0;
      gpu::RankCountersSnapshot counters;
      ASSERT_EQ(Api().counters(team.handle(r), &counters), nullptr);
      EXPECT_EQ(counters.plans, num_calls[r]);
      EXPECT_EQ(counters.dispatches, num_calls[r]);
      EXPECT_EQ(counters.combines, num_calls[r] * HostArrays::kCombines);
      EXPECT_EQ(counters.rows_received, num_rows[r]);
    }
    if (HasFailure()) return;
  }
}

TEST_P(GpuManyRanks, LlGivesTheBitsOfTheCpu) { RunLl(); }

// As groups that have no room for their largest call.
TEST_P(GpuManyRanks, LlInRoundsGivesTheBitsOfTheCpu) {
  options_.shape.round_tokens = shape_.round_tokens = 5;
  if (GpuLlRoundTokens(shape_) == shape_.ll_tokens) GTEST_SKIP() << "calls of one node";
  RunLl();
}

TEST_P(GpuManyRanks, LlHalvesGiveTheBitsOfTheCpu) {
  GpuTeam team(options_);
  for (const Layout layout : {Layout::kExpertMajor, Layout::kExpertBatched, Layout::kRankMajor}) {
    Scenario s{.shape = shape_, .mode = Mode::kLl, .layout = layout, .num_tokens = 12};
    s.recv_rows = WorstRecvRows(shape_, layout, s.num_tokens);
    SCOPED_TRACE(s.Name());
    Arrays a = Prepare(s, team, 24);
    RunHalvesApart(s, team, a);
    for (uint32_t r = 0; r < team.num_ranks() && !HasFailure(); ++r) {
      SCOPED_TRACE("rank " + std::to_string(r));
      ExpectPlan(a.whole[r], a.host[r]);
      ExpectDispatch(a.whole[r], a.host[r], 0);
      for (int i = 0; i < kHalvedCombines; ++i) ExpectCombine(a.whole[r], a.host[r], i);
    }
    if (HasFailure()) return;
  }
}

void GpuManyRanks::RunHt() {
  if (!FitsCallsOfSeveralKernels()) GTEST_SKIP() << shape_.num_ranks << " ranks need more GPUs";
  GpuTeam team(options_);
  for (const Layout layout : {Layout::kExpertMajor, Layout::kRankMajor}) {
    Scenario s{.shape = shape_, .mode = Mode::kHt, .layout = layout};
    s.num_tokens = static_cast<int64_t>(shape_.max_tokens);
    s.recv_rows = WorstRecvRows(shape_, layout, s.num_tokens);
    SCOPED_TRACE(s.Name());
    Arrays a = Prepare(s, team, 22);
    Step(s, team, [&](uint32_t r, Calls& calls) { calls.Plan(a.planned[r]); });
    for (int i = 0; i < HostArrays::kDispatches && !HasFailure(); ++i) {
      Step(s, team, [&](uint32_t r, Calls& calls) { calls.Dispatch(a.planned[r], i); });
    }
    for (int i = 0; i < HostArrays::kCombines && !HasFailure(); ++i) {
      Step(s, team, [&](uint32_t r, Calls& calls) { calls.Combine(a.planned[r], i); });
    }
    for (uint32_t r = 0; r < team.num_ranks() && !HasFailure(); ++r) {
      SCOPED_TRACE("rank " + std::to_string(r));
      ExpectPlan(a.planned[r], a.host[r]);
      for (int i = 0; i < HostArrays::kDispatches; ++i) ExpectDispatch(a.planned[r], a.host[r], i);
      for (int i = 0; i < HostArrays::kCombines; ++i) ExpectCombine(a.planned[r], a.host[r], i);
    }
    if (HasFailure()) return;
  }
}

TEST_P(GpuManyRanks, HtGivesTheBitsOfTheCpu) { RunHt(); }

// Of more tokens than a chunk, in groups that have no room for them at once.
TEST_P(GpuManyRanks, HtInRoundsGivesTheBitsOfTheCpu) {
  options_.shape.max_tokens = shape_.max_tokens = 100;
  options_.arena_bytes = uint64_t{256} << 20;
  if (!gpu::HtRoundsOf(shape_).are_several) GTEST_SKIP() << "one round holds all";
  RunHt();
}

INSTANTIATE_TEST_SUITE_P(Groups, GpuManyRanks,
                         ::testing::Values(std::tuple(16u, 16u), std::tuple(32u, 32u),
                                           std::tuple(48u, 48u), std::tuple(64u, 64u),
                                           std::tuple(16u, 4u), std::tuple(32u, 8u),
                                           std::tuple(96u, 8u), std::tuple(128u, 64u),
                                           std::tuple(128u, 1u), std::tuple(81u, 9u),
                                           std::tuple(153u, 17u)),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) + "_in_nodes_of_" +
                                  std::to_string(std::get<1>(info.param));
                         });

// Ranks agree on what crosses the wire, not on how each of them moves it: JAX_EP_GPU_TMA, an arena
// that only one has, JAX_EP_GPU_SMS.
TEST(GpuMixedRanks, GiveTheBitsOfTheCpu) {
  if (NumDevices() == 0) GTEST_SKIP() << "no CUDA device";
  constexpr uint64_t kEven = 0b0101, kLast = 0b1000, kFirst = 0b0001;
  for (const uint64_t hidden : {256u, 7168u}) {
    for (const auto& [mode, num_tokens] :
         {std::pair(Mode::kLl, 24u), std::pair(Mode::kLl, 128u), std::pair(Mode::kHt, 128u)}) {
      Scenario s{.shape = ShapeOf(4, 4), .mode = mode, .layout = Layout::kExpertMajor};
      s.shape.hidden = hidden;
      s.shape.max_tokens = s.shape.ll_tokens = num_tokens;
      s.shape.depth = 3;
      s.num_tokens = num_tokens;
      s.recv_rows = WorstRecvRows(s.shape, s.layout, s.num_tokens);
      SCOPED_TRACE(s.Name());
      GpuTeam team({.shape = s.shape,
                    .max_sms = 16,
                    .arena_bytes = uint64_t{2} << 30,
                    .staged_ranks = kLast | kFirst,
                    .plain_ranks = kEven,
                    .narrow_ranks = kFirst});
      Arrays a = Prepare(s, team, 23);
      std::vector<DeviceArrays> halves, from;
      std::vector<DeviceArray<int32_t>> epochs;
      for (uint32_t r = 0; r < 4; ++r) {
        halves.push_back(Upload(s, team, r, a.host[r]));
        from.push_back(Upload(s, team, r, a.host[r]));
        epochs.push_back(DeviceArray<int32_t>::Output(team, r, 2));
      }
      Step(s, team, [&](uint32_t r, Calls& calls) {
        RunWhole(s, calls, a.whole[r], a.planned[r]);
        RunHalves(s, calls, from[r], halves[r], epochs[r].data(), /*ends_in_order=*/false);
      });
      for (uint32_t r = 0; r < 4 && !::testing::Test::HasFailure(); ++r) {
        SCOPED_TRACE("rank " + std::to_string(r));
        ExpectPlan(a.whole[r], a.host[r]);
        ExpectDispatch(a.whole[r], a.host[r], 0);
        for (int i = 0; i < HostArrays::kDispatches; ++i) {
          ExpectDispatch(a.planned[r], a.host[r], i);
        }
        for (int i = 0; i < HostArrays::kCombines; ++i) {
          ExpectCombine(a.whole[r], a.host[r], i);
          if (HasHalves(s)) ExpectCombine(halves[r], a.host[r], i);
        }
        if (HasHalves(s)) ExpectDispatch(halves[r], a.host[r], 0);
      }
      if (::testing::Test::HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace jax_ep::testing
