// Dispatches whose rows the kernels quantise on their way, in both modes: the bits that the CPU's
// quantiser gives.
#include <gtest/gtest.h>

#include "tests/kernels_gpu/push_scenario.h"
#include "tests/kernels_gpu/wire_scenario.h"

namespace jax_ep::testing {
namespace {

constexpr uint32_t kBlocks[] = {16, 32, 64, 128, 256, 512};

bool Fits(const WireCase& wire) {
  const GroupShape& shape = wire.scenario.shape;
  return shape.hidden % wire.block == 0 && RecordBytes(shape.hidden, wire.block, wire.scale) <=
                                               shape.hidden * ElemBytes(shape.elem_type);
}

// The calls of one rank: a plan, a dispatch that follows it, in mode ll also plan and dispatch in
// one.
const char* LaunchAll(const WireCase& wire, GpuTeam& team, uint32_t r, DeviceArrays& d,
                      WireArrays& planned, WireArrays& whole) {
  const Scenario& s = wire.scenario;
  const PlanParams plan = PlanOf(s, d);
  if (const char* error = Api().plan(team.handle(r), &s.shape, &plan, team.stream(r))) return error;
  const DispatchParams dispatch = WireDispatchOf(wire, d, planned);
  if (const char* error = Api().dispatch(team.handle(r), &s.shape, &dispatch, team.stream(r)))
    return error;
  if (s.mode != Mode::kLl) return nullptr;
  LlDispatchParams ll{.plan = plan, .dispatch = WireDispatchOf(wire, d, whole)};
  ll.dispatch.send_slot = {};
  ll.dispatch.recv_src = {};
  ll.dispatch.recv_topk_idx = {};
  return Api().ll_dispatch(team.handle(r), &s.shape, &ll, team.stream(r));
}

void RunWire(const WireCase& wire, Team& cpu, GpuTeam& team, std::mt19937& random) {
  SCOPED_TRACE(wire.Name());
  const Scenario& s = wire.scenario;
  std::vector<HostArrays> host = RunOnCpu(s, cpu, random);
  if (::testing::Test::HasFailure()) return;
  team.Reset();
  std::vector<DeviceArrays> device;
  std::vector<WireArrays> planned, whole;
  for (uint32_t r = 0; r < team.num_ranks(); ++r) {
    host[r].x = HardRows(s.shape, s.num_tokens, random);
    device.push_back(Upload(s, team, r, host[r]));
    planned.push_back(OutputsOf(wire, team, r, host[r]));
    whole.push_back(OutputsOf(wire, team, r, host[r]));
  }
  const auto late_rank = static_cast<uint32_t>(random() % (2 * team.num_ranks()));
  const std::string error = team.Run([&](uint32_t r) {
    if (r == late_rank) Delay(team, r);
    return LaunchAll(wire, team, r, device[r], planned[r], whole[r]);
  });
  ASSERT_EQ(error, "");
  ExpectNoFailure(team);
  for (uint32_t r = 0; r < team.num_ranks() && !::testing::Test::HasFailure(); ++r) {
    SCOPED_TRACE("rank " + std::to_string(r));
    const WireResult expected = ExpectedOf(wire, host, host[r]);
    ExpectPlan(device[r], host[r]);
    ExpectWire(wire, planned[r], expected, host[r]);
    if (s.mode != Mode::kLl) continue;
    SCOPED_TRACE("plan and dispatch in one");
    ExpectWire(wire, whole[r], expected, host[r]);
  }
}

class GpuWire : public ::testing::Test {
 protected:
  void SetUp() override {
    if (NumDevices() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_F(GpuWire, RandomScenariosGiveTheBitsOfTheCpu) {
  const uint32_t num_seeds = NumSeeds(60);
  for (uint32_t seed = 0; seed < num_seeds && !HasFailure(); ++seed) {
    std::mt19937 random(seed);
    GroupShape shape;
    shape.num_ranks = shape.node_size = Pick<uint32_t>(random, {1, 2, 2, 3, 4});
    shape.num_experts = shape.num_ranks * Pick<uint32_t>(random, {1, 3, 4, 40});
    shape.top_k = std::min(Pick<uint32_t>(random, {1, 2, 8, 8}), shape.num_experts);
    shape.align = Pick<uint32_t>(random, {1, 4, 24});
    shape.elem_type = Pick(random, {ElemType::kF32, ElemType::kBf16, ElemType::kF16});
    shape.hidden = Pick<uint64_t>(random, {16, 48, 512, 1040, 1536, 7168});
    shape.max_tokens = Pick<uint64_t>(random, {1, 40, 130});
    if (shape.hidden > 1000) shape.max_tokens = 40;
    if (shape.num_experts * shape.max_tokens * shape.hidden > 20'000'000) shape.max_tokens = 3;
    ShrinkIfAsked(shape);
    shape.ll_tokens = shape.max_tokens;
    GpuTeamOptions options{.shape = shape};
    options.use_tma = random() % 3 != 0;
    options.max_sms = SmsThatFit(Pick<uint32_t>(random, {1, 3, 16}), shape.num_ranks);
    options.in_place = random() % 4 != 0;
    options.plain_ranks = random() % 3 == 0 ? random() % 16 : 0;
    options.arena_bytes = uint64_t{1} << 30;
    options.operations_before = OperationsBefore(seed);
    Team cpu({.shape = shape});
    GpuTeam team(options);
    for (int round = 0; round < 4 && !HasFailure(); ++round) {
      SCOPED_TRACE("seed " + std::to_string(seed) + (options.in_place ? "" : " staged") +
                   (options.use_tma ? "" : " plain"));
      WireCase wire{.scenario = {.shape = shape}};
      Scenario& s = wire.scenario;
      s.mode = random() % 2 == 0 ? Mode::kLl : Mode::kHt;
      s.layout = Pick(random, {Layout::kExpertMajor, Layout::kExpertBatched, Layout::kRankMajor});
      s.num_tokens =
          static_cast<int64_t>(round == 0 ? shape.max_tokens : 1 + random() % shape.max_tokens);
      s.draw = Pick(random,
                    {Draw::kUniform, Draw::kZipf, Draw::kOneExpert, Draw::kIdleRank, Draw::kMessy});
      s.recv_rows = DrawRecvRows(s, random);
      if (random() % 5 == 0) s.misalignment = ElemBytes(shape.elem_type);
      wire.scale = random() % 2 == 0 ? Fp8Scale::kF32 : Fp8Scale::kUe8m0;
      wire.delivery =
          Pick(random, {Delivery::kRows, Delivery::kScalesInRows, Delivery::kScalesInColumns});
      wire.zero_padding = random() % 3 != 0;
      wire.has_weights = random() % 4 != 0;
      do {
        wire.block = kBlocks[random() % std::size(kBlocks)];
      } while (!Fits(wire));
      RunWire(wire, cpu, team, random);
    }
  }
}

TEST_F(GpuWire, AModelSizedShape) {
  GroupShape shape;
  shape.num_ranks = shape.node_size = 2;
  shape.num_experts = 64;
  shape.top_k = 8;
  shape.align = 16;
  shape.hidden = 7168;
  shape.max_tokens = 128;
  shape.ll_tokens = 64;
  shape.elem_type = ElemType::kBf16;
  shape.f32_partials = false;
  Team cpu({.shape = shape});
  GpuTeam team({.shape = shape, .arena_bytes = uint64_t{2} << 30});
  std::mt19937 random(5);
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    for (const Delivery delivery : {Delivery::kRows, Delivery::kScalesInRows}) {
      WireCase wire{.scenario = {.shape = shape, .mode = mode}, .delivery = delivery};
      Scenario& s = wire.scenario;
      s.num_tokens = mode == Mode::kLl ? 64 : 128;
      s.recv_rows = s.num_tokens * 8 * 5 / 4 + 32 * 16;
      RunWire(wire, cpu, team, random);
      if (HasFailure()) return;
    }
  }
}

TEST_F(GpuWire, BadFormatsAreRefused) {
  GroupShape shape;
  shape.hidden = 96;
  shape.max_tokens = shape.ll_tokens = 4;
  shape.elem_type = ElemType::kBf16;
  GpuTeam team({.shape = shape});
  Team cpu({.shape = shape});
  std::mt19937 random(1);
  WireCase wire{.scenario = {.shape = shape, .mode = Mode::kHt, .num_tokens = 4}};
  wire.scenario.recv_rows = 4;
  const std::vector<HostArrays> host = RunOnCpu(wire.scenario, cpu, random);
  DeviceArrays d = Upload(wire.scenario, team, 0, host[0]);
  WireArrays out = OutputsOf(wire, team, 0, host[0]);
  const auto error_of = [&](const DispatchParams& params) -> std::string {
    const char* error = Api().dispatch(team.handle(0), &shape, &params, team.stream(0));
    return error == nullptr ? "" : error;
  };
  for (const uint32_t block : {48u, 64u, 1024u}) {
    wire.block = block;
    EXPECT_NE(error_of(WireDispatchOf(wire, d, out)).find("expected 16 * 2^i"), std::string::npos);
  }
  wire.block = 32;
  DispatchParams weighted = WireDispatchOf(wire, d, out);
  weighted.row_weights = d.row_weights.span();
  EXPECT_NE(error_of(weighted).find("row_weights"), std::string::npos);
}

}  // namespace
}  // namespace jax_ep::testing
