// Groups that go on without some of their ranks, whose memory nobody has: the bits of a group in
// which these are, route nothing and are sent nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "tests/kernels_gpu/push_scenario.h"

namespace jax_ep::testing {
namespace {

class GpuActive : public ::testing::Test {
 protected:
  void SetUp() override {
    if (NumDevices() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

uint64_t DrawMask(uint32_t num_ranks, std::mt19937& random) {
  const uint64_t all = ~uint64_t{0} >> (64 - num_ranks);
  while (true) {
    const uint64_t mask = random() & all;
    if (mask != 0 && mask != all) return mask;
  }
}

TEST_F(GpuActive, RandomMasksGiveTheBitsOfTheCpu) {
  const uint32_t num_seeds = NumSeeds(40);
  for (uint32_t seed = 0; seed < num_seeds && !HasFailure(); ++seed) {
    std::mt19937 random(seed + 77);
    GroupShape shape;
    shape.num_ranks = shape.node_size = Pick<uint32_t>(random, {2, 3, 4, 4, 8, 20});
    const bool has_three_kernels = shape.num_ranks == 20;  // of a plan
    shape.num_experts = shape.num_ranks * Pick<uint32_t>(random, {1, 3, 40});
    shape.top_k = std::min(Pick<uint32_t>(random, {1, 2, 6, 8}), shape.num_experts);
    shape.align = Pick<uint32_t>(random, {1, 4, 24});
    shape.elem_type = Pick(random, {ElemType::kF32, ElemType::kBf16, ElemType::kF16});
    shape.hidden = Pick<uint64_t>(random, {8, 136, 513, 1024});
    shape.max_tokens = Pick<uint64_t>(random, {1, 5, 20, 130, 1200});
    if (has_three_kernels || shape.num_experts > 100) shape.max_tokens = 20;
    shape.ll_tokens = std::min<uint64_t>(shape.max_tokens, 130);
    shape.f32_partials = random() % 2 == 0;
    shape.depth = 3;
    const uint64_t active = DrawMask(shape.num_ranks, random);
    GpuTeamOptions options{.shape = shape};
    options.in_place = random() % 4 != 0;
    options.use_tma = random() % 3 != 0;
    options.max_sms = SmsThatFit(16, shape.num_ranks);
    options.arena_bytes = uint64_t{2} << 30;
    options.operations_before = OperationsBefore(seed);
    options.active = active;
    if (has_three_kernels) options.arena_bytes = uint64_t{512} << 20;
    Team cpu({.shape = shape});
    GpuTeam team(options);
    for (int round = 0; round < 4 && !HasFailure(); ++round) {
      SCOPED_TRACE("seed " + std::to_string(seed) + (options.in_place ? "" : " staged") +
                   (options.use_tma ? "" : " plain"));
      Scenario s{.shape = shape, .active = active};
      s.mode = round % 2 == 0 ? Mode::kHt : Mode::kLl;
      s.layout = Pick(random, {Layout::kExpertMajor, Layout::kExpertBatched, Layout::kRankMajor});
      const uint64_t most = s.mode == Mode::kHt ? shape.max_tokens : shape.ll_tokens;
      s.num_tokens = static_cast<int64_t>(round < 2 ? most : random() % (most + 1));
      s.draw =
          Pick(random, {Draw::kUniform, Draw::kZipf, Draw::kOneExpert, Draw::kMessy, Draw::kMessy});
      s.recv_rows = DrawRecvRows(s, random);
      RunPushScenario(s, cpu, team, random);
    }
  }
}

// Rank 0 of three, of which rank 1 takes no part, makes one call.
class GpuMisfit : public GpuActive {
 protected:
  struct Failed {
    uint32_t kind, peer;
    gpu::Misfit misfit;
  };
  using Change = std::function<void(HostArrays&)>;
  using Call = std::function<void(Calls&, DeviceArrays&)>;

  static Failed Run(Mode mode, const Change& change, const Call& call) {
    GroupShape shape;
    shape.num_ranks = shape.node_size = 3;
    shape.num_experts = 6;
    shape.top_k = 2;
    shape.align = 4;
    shape.hidden = 64;
    shape.max_tokens = shape.ll_tokens = 8;
    shape.elem_type = ElemType::kF32;
    Scenario s{.shape = shape, .mode = mode};
    s.recv_rows = WorstRecvRows(shape, s.layout, s.num_tokens);
    Team cpu({.shape = shape});
    std::mt19937 random(5);
    std::vector<HostArrays> host = RunOnCpu(s, cpu, random);
    change(host[0]);
    GpuTeam team({.shape = shape, .timeout_ns = 2'000'000'000, .active = 0b101});
    DeviceArrays arrays = Upload(s, team, 0, host[0]);
    arrays.send_slot.Upload(host[0].send_slot);
    arrays.recv_src.Upload(host[0].recv_src);
    const std::string error = team.Run([&](uint32_t r) -> const char* {
      if (r != 0) return nullptr;
      Calls calls(s, team, r);
      call(calls, arrays);
      return calls.error();
    });
    EXPECT_EQ(error, "");
    const gpu::RankStatus& status = team.status(0);
    EXPECT_EQ(status.failed.load(), 1u);
    return {status.kind, status.peer, static_cast<gpu::Misfit>(status.expected)};
  }
  static void Expect(const Failed& failed, uint32_t peer, gpu::Misfit misfit) {
    EXPECT_EQ(failed.kind, static_cast<uint32_t>(gpu::FailureKind::kNotActive));
    EXPECT_EQ(failed.peer, peer);
    EXPECT_EQ(failed.misfit, misfit);
  }
  // Makes the plan, or routes.
  static void Route(Mode mode, Calls& calls, DeviceArrays& arrays) {
    mode == Mode::kHt ? calls.Plan(arrays) : calls.LlDispatch(arrays);
  }
};

TEST_F(GpuMisfit, AnExpertOfARankThatTakesNoPart) {
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    const auto failed = Run(
        mode, [](HostArrays&) {},
        [&](Calls& calls, DeviceArrays& arrays) { Route(mode, calls, arrays); });
    Expect(failed, 1, gpu::Misfit::kExpert);
  }
}

TEST_F(GpuMisfit, AMaskWithoutARankThatTakesPart) {
  const auto mask_out = [](HostArrays& arrays) {
    for (int32_t& id : arrays.topk_idx) id = kUnreachable + 4;  // of rank 2
  };
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    const auto failed = Run(
        mode, mask_out, [&](Calls& calls, DeviceArrays& arrays) { Route(mode, calls, arrays); });
    Expect(failed, 2, gpu::Misfit::kMaskOut);
  }
}

TEST_F(GpuMisfit, APlanWithRowsFromOrForARankThatTakesNoPart) {
  const auto without = [](std::vector<int32_t> HostArrays::* array) {
    return [array](HostArrays& arrays) { std::ranges::fill(arrays.*array, -1); };
  };
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    for (const auto array : {&HostArrays::send_slot, &HostArrays::recv_src}) {
      const auto dispatch = [](Calls& calls, DeviceArrays& arrays) { calls.Dispatch(arrays, 0); };
      const auto combine = [](Calls& calls, DeviceArrays& arrays) { calls.Combine(arrays, 0); };
      Expect(Run(mode, without(array), dispatch), 1, gpu::Misfit::kPlan);
      Expect(Run(mode, without(array), combine), 1, gpu::Misfit::kPlan);
    }
  }
}

}  // namespace
}  // namespace jax_ep::testing
