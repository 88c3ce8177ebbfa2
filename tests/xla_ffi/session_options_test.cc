#include "xla_ffi/session_options.h"

#include <gtest/gtest.h>

#include "proxy/abi/command.h"

namespace jax_ep {
namespace {

TEST(PlaceOf, counts_the_ranks_of_all_teams_on_this_host) {
  // Two teams of four ranks over two hosts; this host has ranks 2 and 3 of both.
  const SessionOptions options{.host_ranks = {{0, 2}, {0, 3}, {1, 2}, {1, 3}}};
  uint32_t index = 0;
  for (const auto& [team, rank] : options.host_ranks) {
    const RankPlace place = PlaceOf(options, LocalRank{.team = team, .rank = rank});
    EXPECT_EQ(place.local_index, index++);
    EXPECT_EQ(place.num_local, 4u);
    EXPECT_EQ(place.device_pci, "");
  }
}

TEST(PlaceOf, is_unknown_for_a_rank_that_the_host_does_not_list) {
  EXPECT_EQ(PlaceOf(SessionOptions{}, LocalRank{}).num_local, 0u);
}

// 8 ranks, T = 65,536, H = 98,304, f32: 1.2 TiB each.
SessionOptions HugeGroup(uint32_t node_size) {
  return {.name = "huge",
          .shape = {.num_ranks = 8,
                    .node_size = node_size,
                    .num_experts = 8,
                    .top_k = 2,
                    .hidden = 98304,
                    .max_tokens = 65536}};
}

TEST(CheckReach, refuses_what_a_command_cannot_name) {
  const SessionOptions huge = HugeGroup(1);
  const uint64_t bytes = HeapLayout::Make(huge.shape).total_bytes;
  ASSERT_GT(bytes, uint64_t{1} << 40);
  const Status status = CheckReach(huge, bytes);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  for (const char* part : {"group huge", "at most 1024.0 GiB", "lower max_tokens"}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
  // The last offset that TryPack takes, and the first that it does not.
  EXPECT_TRUE(CheckReach(huge, uint64_t{1} << 40).ok());
  EXPECT_FALSE(CheckReach(huge, (uint64_t{1} << 40) + 16).ok());
  for (uint64_t Command::* offset : {&Command::local_offset, &Command::remote_offset}) {
    Command command{.op = Op::kWrite, .length_bytes = 16};
    command.*offset = (uint64_t{1} << 40) - 16;
    EXPECT_TRUE(TryPack(command).has_value());
    command.*offset += 16;
    EXPECT_FALSE(TryPack(command).has_value());
  }
}

TEST(CheckReach, takes_any_size_in_one_node) {
  const SessionOptions huge = HugeGroup(8);
  EXPECT_TRUE(CheckReach(huge, uint64_t{1} << 41).ok());
}

}  // namespace
}  // namespace jax_ep
