#include "xla_ffi/totals.h"

#include <gtest/gtest.h>

namespace jax_ep {
namespace {

TEST(Totals, AsJsonHaveAllThatThePageShows) {
  const SessionTotals totals{
      .name = "ep \"a\"\n",
      .num_ranks = 2,
      .failure = "",
      .ranks = {{.id = {.device_ordinal = 9, .team = 3, .rank = 1},
                 .plans = 4,
                 .dispatches = 5,
                 .combines = 6,
                 .rows_received = 70,
                 .rows_dropped = 8,
                 .invalid_ids = 2,
                 .wait_ns = 4321,
                 .pairs_per_expert = {11, 12},
                 .wait_by_peer = {1, 0, 20, 0, 300, 0, 4000, 0}}},
      .flows = {},
  };
  EXPECT_EQ(ToJson(totals),
            R"({"name": "ep \"a\" ", "num_ranks": 2, "failure": "", "ranks": [{"team": 3, )"
            R"("rank": 1, "plans": 4, "dispatches": 5, "combines": 6, "rows_received": 70, )"
            R"("rows_dropped": 8, "invalid_ids": 2, "wait_ns": 4321, )"
            R"("pairs_per_expert": [11, 12], "wait_by_peer": {"plan": [1, 0], )"
            R"("dispatch": [20, 0], "combine": [300, 0], "reuse": [4000, 0]}}], "flows": []})");
}

}  // namespace
}  // namespace jax_ep
