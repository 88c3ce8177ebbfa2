// Operations whose numbers lose their low bits: cells that nobody clears carry 32 bits of a number,
// epochs of the halves 31. Every operation of every kind is once the one whose bits are all zero.
#include <gtest/gtest.h>

#include <ostream>

#include "tests/kernels_gpu/push_scenario.h"

namespace jax_ep::testing {
namespace {

struct WrapCase {
  const char* name;
  Mode mode;
  bool use_tma;
  uint32_t node_size;

  friend void PrintTo(const WrapCase& c, std::ostream* out) { *out << c.name; }
};

class GpuWrap : public ::testing::TestWithParam<WrapCase> {
 protected:
  static constexpr uint32_t kRanks = 4;

  void SetUp() override {
    if (NumDevices() == 0) GTEST_SKIP() << "no CUDA device";
  }

  static void Run(uint64_t boundary, uint32_t num_before) {
    SCOPED_TRACE(std::to_string(num_before) + " operations come before number " +
                 std::to_string(boundary));
    const WrapCase& c = GetParam();
    GroupShape shape;
    shape.num_ranks = kRanks;
    shape.node_size = c.node_size;
    shape.num_experts = 8;
    shape.top_k = 2;
    shape.align = 4;
    shape.hidden = 64;
    // A pair has a row on one rank: most cells of the others' tables are never written.
    shape.max_tokens = shape.ll_tokens = 24;
    shape.elem_type = ElemType::kF32;
    Scenario s{.shape = shape, .mode = c.mode, .num_tokens = 24, .draw = Draw::kMessy};
    s.recv_rows = WorstRecvRows(shape, s.layout, s.num_tokens);
    Team cpu({.shape = shape});
    GpuTeam team({.shape = shape,
                  .use_tma = c.use_tma,
                  .max_sms = 8,
                  .timeout_ns = 5'000'000'000,
                  .arena_bytes = uint64_t{32} << 20,
                  .operations_before = boundary - 1 - num_before});
    std::mt19937 random(num_before);
    RunPushScenario(s, cpu, team, random);
  }
};

TEST_P(GpuWrap, TheOperationWithNoLowBitsGivesTheBitsOfTheCpu) {
  // That RunPushScenario launches, at most: between nodes some calls are two operations.
  constexpr uint32_t kOperations = 27;
  for (const uint32_t bits : {32u, 31u}) {
    for (uint32_t number = 0; number < kOperations && !HasFailure(); ++number) {
      Run(uint64_t{1} << bits, number);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, GpuWrap,
                         ::testing::Values(WrapCase{"HtBulk", Mode::kHt, true, 4},
                                           WrapCase{"HtPlain", Mode::kHt, false, 4},
                                           WrapCase{"HtNodes", Mode::kHt, true, 2},
                                           WrapCase{"LlBulk", Mode::kLl, true, 4},
                                           WrapCase{"LlPlain", Mode::kLl, false, 4},
                                           WrapCase{"LlNodes", Mode::kLl, true, 2}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace jax_ep::testing
