// Other kernels hold all multiprocessors but a few, as a long product of the model does: then few
// of a grid's blocks run at a time, and no path may need more of them at once.
#include <gtest/gtest.h>

#include <memory>
#include <ostream>

#include "tests/kernels_gpu/hold_sms.h"
#include "tests/kernels_gpu/push_scenario.h"

namespace jax_ep::testing {
namespace {

struct FewSmsCase {
  const char* name;
  Mode mode;
  bool use_tma;
  uint32_t num_free;
  uint32_t num_experts = 0;  // 0: 8 of each rank

  friend void PrintTo(const FewSmsCase& c, std::ostream* out) { *out << c.name; }
};

class GpuFewSms : public ::testing::TestWithParam<FewSmsCase> {
 protected:
  void SetUp() override {
    if (NumDevices() < 2) {
      GTEST_SKIP() << "two ranks of one device wait for each other's blocks; this needs two "
                      "devices, there is " +
                          std::to_string(NumDevices());
    }
  }
};

TEST_P(GpuFewSms, EveryCallEndsWhileTheOthersAreHeld) {
  const FewSmsCase& c = GetParam();
  GroupShape shape;
  shape.num_ranks = shape.node_size = static_cast<uint32_t>(NumDevices());
  shape.num_experts = c.num_experts > 0 ? c.num_experts : shape.num_ranks * 8;
  shape.top_k = 4;
  shape.align = 4;
  shape.hidden = 512;
  // 256 chunks of a combine on 16 blocks: if these had fixed tasks, sums would be half a grid away
  // from the partials of their chunks. A plan has 8 slices, more than blocks run at a time, so
  // that those which run count the slices of others.
  constexpr uint64_t kHtTokens = 2048;
  shape.ll_tokens = 192;
  shape.max_tokens = c.mode == Mode::kHt ? kHtTokens : shape.ll_tokens;
  shape.elem_type = ElemType::kBf16;
  shape.depth = 3;
  Team cpu({.shape = shape});
  GpuTeam team({.shape = shape,
                .use_tma = c.use_tma,
                .max_sms = 16,
                .timeout_ns = 4'000'000'000,
                .arena_bytes = uint64_t{1} << 30});
  Scenario s{.shape = shape, .mode = c.mode, .num_tokens = static_cast<int64_t>(shape.max_tokens)};
  s.recv_rows = WorstRecvRows(shape, s.layout, s.num_tokens);
  std::mt19937 random(11);
  std::vector<std::unique_ptr<HeldSms>> held;
  for (uint32_t r = 0; r < team.num_ranks(); ++r) {
    team.UseDeviceOf(r);
    held.push_back(std::make_unique<HeldSms>());
  }
  constexpr uint64_t kAtMostNs = 15'000'000'000;
  RunPushScenario(s, cpu, team, random, [&] {
    for (const auto& sms : held) sms->Hold(c.num_free, kAtMostNs);
  });
  for (const auto& sms : held) EXPECT_TRUE(sms->IsHeld());
  for (const auto& sms : held) sms->LetGo();
}

INSTANTIATE_TEST_SUITE_P(Paths, GpuFewSms,
                         ::testing::Values(FewSmsCase{"HtBulkOne", Mode::kHt, true, 1},
                                           FewSmsCase{"HtBulkThree", Mode::kHt, true, 3},
                                           // Few slices fit, of more pairs than threads keep.
                                           FewSmsCase{"HtManyExpertsOne", Mode::kHt, true, 1, 2048},
                                           FewSmsCase{"HtManyExpertsThree", Mode::kHt, true, 3,
                                                      2048},
                                           FewSmsCase{"HtPlainOne", Mode::kHt, false, 1},
                                           FewSmsCase{"HtPlainThree", Mode::kHt, false, 3},
                                           FewSmsCase{"LlBulkOne", Mode::kLl, true, 1},
                                           FewSmsCase{"LlBulkThree", Mode::kLl, true, 3},
                                           FewSmsCase{"LlPlainOne", Mode::kLl, false, 1},
                                           FewSmsCase{"LlPlainThree", Mode::kLl, false, 3}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace jax_ep::testing
