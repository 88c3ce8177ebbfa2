// Every operation in every mixture, against the oracle; and the same bits where they are promised.
#include "tests/kernels/exchange.h"

#include <gtest/gtest.h>

#include <random>

namespace jax_ep::testing {
namespace {

template <typename T>
T Pick(std::mt19937& random, std::initializer_list<T> choices) {
  return *(choices.begin() + random() % choices.size());
}

// A random scenario of one node per team (or several with `node_sizes`).
Scenario DrawScenario(uint32_t seed, bool is_multi_node) {
  std::mt19937 random(seed);
  Scenario scenario;
  const auto num_ranks = is_multi_node ? Pick<uint32_t>(random, {2, 3, 4, 6, 8})
                                       : Pick<uint32_t>(random, {1, 2, 3, 4, 8});
  uint32_t node_size = num_ranks;
  while (is_multi_node && (node_size == num_ranks || num_ranks % node_size != 0)) {
    node_size = Pick<uint32_t>(random, {1, 2, 3, 4});
  }
  const auto experts_per_rank = Pick<uint32_t>(random, {1, 3, 4});
  const auto top_k = std::min(Pick<uint32_t>(random, {1, 2, 8}), num_ranks * experts_per_rank);
  const auto tokens = Pick<int64_t>(random, {0, 1, 7, 7, 33, 129});
  const auto hidden = Pick<uint64_t>(random, {8, 136, 513});
  // The oracle is slow: wide rows only with few pairs.
  const bool is_large = num_ranks * top_k * tokens > 1000;
  const auto type = Pick(random, {ElemType::kF32, ElemType::kBf16, ElemType::kF16});
  scenario.shape =
      MakeShape(num_ranks, node_size, num_ranks * experts_per_rank, top_k, is_large ? 8 : hidden,
                std::max<uint64_t>(1, static_cast<uint64_t>(tokens) + random() % 3), type);
  scenario.shape.align = Pick<uint32_t>(random, {1, 4, 24});
  scenario.shape.f32_partials = random() % 2 == 0;
  scenario.shape.depth = Pick<uint32_t>(random, {2, 2, 3});
  scenario.shape.round_tokens = Pick<uint64_t>(random, {0, 0, 1, 5, 32});
  scenario.in_process = random() % 2 == 0;
  scenario.threads_per_rank = random() % 4 == 0 ? 2 : 1;
  scenario.mode = Pick(random, {Mode::kHt, Mode::kLl});
  scenario.layout = Pick(random, {Layout::kExpertMajor, Layout::kExpertMajor,
                                  Layout::kExpertBatched, Layout::kRankMajor});
  scenario.num_tokens = tokens;
  scenario.draw = Pick(random, {Draw::kUniform, Draw::kZipf, Draw::kOneExpert, Draw::kIdleRank,
                                Draw::kMessy, Draw::kMessy});
  scenario.capacity =
      Pick(random, {Capacity::kWorst, Capacity::kExact, Capacity::kOneShort, Capacity::kHalf});
  scenario.in_halves = random() % 3 == 0;
  scenario.is_view = random() % 3 == 0;
  scenario.seed = seed;
  // Two of three start where 32 bits run out after the first round or amid one: eight days of
  // decoding.
  constexpr uint64_t kFirstEpochs[] = {0, (uint64_t{1} << 31) - 2, (uint64_t{1} << 32) - 2};
  scenario.first_epoch = kFirstEpochs[seed % 3];
  return scenario;
}

TEST(Exchange, RandomScenariosOfOneNodeAgreeWithTheOracle) {
  for (uint32_t seed = 0; seed < 150 && !HasFailure(); ++seed) {
    RunScenario(DrawScenario(seed, /*is_multi_node=*/false));
  }
}

TEST(Exchange, EveryLayoutModeAndHalfOnOneNode) {
  for (const bool in_process : {true, false}) {
    for (const Mode mode : {Mode::kHt, Mode::kLl}) {
      for (const Layout layout :
           {Layout::kExpertMajor, Layout::kExpertBatched, Layout::kRankMajor}) {
        for (const bool in_halves : {false, true}) {
          Scenario scenario;
          scenario.shape = MakeShape(4, 4, 8, 3, 24, 16);
          scenario.in_process = in_process;
          scenario.mode = mode;
          scenario.layout = layout;
          scenario.num_tokens = 16;
          scenario.draw = Draw::kMessy;
          scenario.in_halves = in_halves;
          RunScenario(scenario);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Sixty-four pairs per token, more experts than K on each rank: the widest sum.
TEST(Exchange, SixtyFourPairsPerToken) {
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    Scenario scenario;
    scenario.shape = MakeShape(8, 8, 128, 64, 40, 9, ElemType::kBf16);
    scenario.mode = mode;
    scenario.num_tokens = 9;
    scenario.shape.f32_partials = false;
    RunScenario(scenario);
  }
}

TEST(Exchange, StagedAndDirectGiveTheSameBits) {
  for (const bool f32_partials : {true, false}) {
    for (const Layout layout : {Layout::kExpertMajor, Layout::kRankMajor}) {
      Scenario scenario;
      scenario.shape = MakeShape(8, 8, 16, 8, 72, 20, ElemType::kBf16);
      scenario.shape.f32_partials = f32_partials;
      scenario.layout = layout;
      scenario.num_tokens = 20;
      const auto direct = RunScenario(scenario);
      scenario.in_process = false;
      EXPECT_TRUE(direct == RunScenario(scenario));
      scenario.mode = Mode::kLl;
      EXPECT_TRUE(direct == RunScenario(scenario));
    }
  }
}

TEST(Exchange, RandomScenariosOfSeveralNodesAgreeWithTheOracle) {
  for (uint32_t seed = 0; seed < 100 && !HasFailure(); ++seed) {
    RunScenario(DrawScenario(seed, /*is_multi_node=*/true));
  }
}

TEST(Exchange, EveryLayoutModeAndHalfOnSeveralNodes) {
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    for (const Layout layout : {Layout::kExpertMajor, Layout::kExpertBatched, Layout::kRankMajor}) {
      for (const bool in_halves : {false, true}) {
        Scenario scenario;
        scenario.shape = MakeShape(6, 2, 12, 3, 24, 16);
        scenario.mode = mode;
        scenario.layout = layout;
        scenario.num_tokens = 16;
        scenario.draw = Draw::kMessy;
        scenario.in_halves = in_halves;
        RunScenario(scenario);
        if (HasFailure()) return;
      }
    }
  }
}

// f32 partials: any power-of-two node size, in one process or not, HT or LL.
TEST(Exchange, F32PartialsGiveTheSameBitsForEveryNodeSize) {
  for (const uint32_t num_ranks : {8u, 6u}) {
    Scenario scenario;
    scenario.shape = MakeShape(num_ranks, num_ranks, num_ranks * 2, 8, 72, 20, ElemType::kBf16);
    scenario.num_tokens = 20;
    if (num_ranks == 6) scenario.shape.node_size = 2;
    const auto expected = RunScenario(scenario);
    ASSERT_FALSE(expected.empty());
    for (const uint32_t node_size : {1u, 2u, 4u}) {
      if (num_ranks % node_size != 0) continue;
      for (const Mode mode : {Mode::kHt, Mode::kLl}) {
        for (const bool in_halves : {false, true}) {
          if (in_halves && mode == Mode::kLl) continue;
          scenario.shape.node_size = node_size;
          scenario.mode = mode;
          scenario.in_process = node_size != 2;
          EXPECT_TRUE(expected == RunScenario(scenario)) << scenario.Name();
        }
      }
    }
  }
}

// Partials of the element type: the same bits for equal node size.
TEST(Exchange, DtypePartialsGiveTheSameBitsForEqualNodeSize) {
  for (const uint32_t node_size : {1u, 2u, 4u}) {
    Scenario scenario;
    scenario.shape = MakeShape(8, node_size, 16, 8, 72, 20, ElemType::kBf16);
    scenario.shape.f32_partials = false;
    scenario.num_tokens = 20;
    const auto expected = RunScenario(scenario);
    ASSERT_FALSE(expected.empty());
    scenario.in_process = false;
    EXPECT_TRUE(expected == RunScenario(scenario)) << scenario.Name();
    scenario.mode = Mode::kLl;
    EXPECT_TRUE(expected == RunScenario(scenario)) << scenario.Name();
  }
}

TEST(Exchange, AnUnorderedNetworkChangesNothing) {
  Scenario scenario;
  scenario.shape = MakeShape(4, 2, 8, 2, 136, 33);
  scenario.num_tokens = 33;
  scenario.num_rounds = 5;
  for (const Mode mode : {Mode::kHt, Mode::kLl}) {
    scenario.mode = mode;
    scenario.faulty_spec.clear();
    const auto expected = RunScenario(scenario);
    for (uint32_t seed = 0; seed < 5; ++seed) {
      scenario.faulty_spec = "seed=" + std::to_string(seed) +
                             ",reorder=16,duplicate=10,split=10,delay=4,again=5,payload_late=1";
      EXPECT_TRUE(expected == RunScenario(scenario)) << scenario.Name();
    }
  }
}

// As in groups of hundreds of ranks: calls of many rounds, whole and in halves, next to calls of
// one.
TEST(Exchange, RoundsChangeNothing) {
  for (const uint32_t node_size : {6u, 2u}) {
    for (const Mode mode : {Mode::kHt, Mode::kLl}) {
      for (const bool in_halves : {false, true}) {
        Scenario scenario;
        scenario.shape = MakeShape(6, node_size, 12, 3, 24, 17, ElemType::kBf16);
        scenario.shape.f32_partials = false;
        scenario.num_tokens = 17;
        scenario.draw = Draw::kMessy;
        scenario.mode = mode;
        scenario.in_halves = in_halves;
        const auto expected = RunScenario(scenario);
        ASSERT_FALSE(expected.empty());
        for (const uint64_t round_tokens : {1u, 6u}) {
          scenario.shape.round_tokens = round_tokens;
          scenario.in_process = round_tokens == 1;
          if (node_size == 2 && round_tokens == 6) {
            scenario.faulty_spec = "seed=3,reorder=16,duplicate=10,split=10,delay=4,payload_late=1";
          }
          EXPECT_TRUE(expected == RunScenario(scenario)) << scenario.Name();
        }
      }
    }
  }
}

// Far more ranks than slots of a token.
TEST(Exchange, FortyRanksAgreeWithTheOracle) {
  for (const uint32_t node_size : {40u, 4u}) {
    for (const Mode mode : {Mode::kHt, Mode::kLl}) {
      Scenario scenario;
      scenario.shape = MakeShape(40, node_size, 80, 3, 24, 21, ElemType::kBf16);
      scenario.num_tokens = 21;
      scenario.mode = mode;
      scenario.in_process = node_size == 4;
      RunScenario(scenario);
    }
  }
}

TEST(Exchange, ManyCallsBackToBack) {
  Scenario scenario;
  scenario.shape = MakeShape(4, 4, 8, 2, 16, 8);
  scenario.num_tokens = 8;
  scenario.num_rounds = 60;
  scenario.draw = Draw::kZipf;
  scenario.in_process = false;
  RunScenario(scenario);
}

}  // namespace
}  // namespace jax_ep::testing
