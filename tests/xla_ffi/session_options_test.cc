#include "xla_ffi/session_options.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

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

SessionOptions ElasticGroup(uint32_t node_size, bool has_ht, std::vector<uint8_t> active) {
  return {.name = "elastic",
          .shape = {.num_ranks = 4, .node_size = node_size, .num_experts = 4, .has_ht = has_ht},
          .team_processes = {{0, 1, 2, 3}},
          .local_ranks = {{.rank = 0}},
          .active = std::move(active)};
}

TEST(CheckOptions, takes_masks_that_leave_nodes_of_mode_ht_whole) {
  EXPECT_TRUE(CheckOptions(ElasticGroup(4, true, {})).ok());
  EXPECT_TRUE(CheckOptions(ElasticGroup(4, true, {1, 0, 1, 0})).ok());
  EXPECT_TRUE(CheckOptions(ElasticGroup(1, true, {1, 0, 1, 0})).ok());
  EXPECT_TRUE(CheckOptions(ElasticGroup(2, true, {1, 1, 0, 0})).ok());
  EXPECT_TRUE(CheckOptions(ElasticGroup(2, false, {1, 1, 0, 1})).ok());
  const Status broken = CheckOptions(ElasticGroup(2, true, {1, 1, 0, 1}));
  EXPECT_EQ(broken.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(broken.message().find("expected whole nodes"), std::string::npos) << broken.message();
  EXPECT_FALSE(CheckOptions(ElasticGroup(4, true, {1, 0, 1})).ok());
  EXPECT_FALSE(CheckOptions(ElasticGroup(4, true, {0, 1, 1, 1})).ok());  // without itself
  SessionOptions teams = ElasticGroup(4, true, {1, 1, 1, 1});
  teams.team_processes.push_back({0, 1, 2, 3});
  EXPECT_FALSE(CheckOptions(teams).ok());
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

TEST(ShapeOfCall, takes_what_the_group_has_room_for) {
  const SessionOptions group{
      .name = "g",
      .shape = {.num_ranks = 4, .num_experts = 16, .top_k = 4, .align = 8, .hidden = 40}};
  const auto of = [&](const std::vector<int64_t>& sizes) {
    return ShapeOfCall(group, "plan", sizes);
  };
  EXPECT_EQ(*of({16, 4, 8, 40}), group.shape);
  GroupShape smaller = group.shape;
  smaller.num_experts = 8;
  smaller.top_k = 1;
  smaller.align = 128;
  smaller.hidden = 7;
  EXPECT_EQ(*of({8, 1, 128, 7}), smaller);

  const std::pair<std::vector<int64_t>, const char*> refused[] = {
      {{16, 4, 8}, "3 sizes, expected 4"},
      {{20, 4, 8, 40}, "num_experts = 20, expected 1 to 16"},
      {{0, 4, 8, 40}, "num_experts = 0, expected 1 to 16"},
      {{6, 4, 8, 40}, "num_experts = 6, expected a multiple of 4"},
      {{16, 5, 8, 40}, "top_k = 5, expected 1 to 4"},
      {{16, 4, 0, 40}, "align = 0, expected 1 to 2147483647"},
      {{16, 4, int64_t{1} << 31, 40}, "align = 2147483648, expected 1 to 2147483647"},
      {{16, 4, 8, 41}, "hidden = 41, expected 1 to 40"},
      {{16, 4, 8, -1}, "hidden = -1, expected 1 to 40"},
  };
  for (const auto& [sizes, message] : refused) {
    const Result<GroupShape> shape = of(sizes);
    ASSERT_EQ(shape.status().code(), StatusCode::kInvalidArgument) << message;
    EXPECT_TRUE(shape.status().message().starts_with("group g: plan: got a call of "));
    EXPECT_NE(shape.status().message().find(message), std::string::npos)
        << shape.status().message();
  }
}

TEST(CheckReach, refuses_more_ranks_than_a_message_can_name) {
  SessionOptions options;
  options.name = "g";
  options.shape = {.num_ranks = 1032, .node_size = 8};
  EXPECT_EQ(CheckReach(options, 1).message(),
            "group g: got 1032 ranks in several nodes, expected at most 1024, the most that a "
            "message between nodes can name; use a mesh axis of fewer devices, or several groups");
  options.shape.node_size = 1032;
  EXPECT_TRUE(CheckReach(options, 1).ok());
  options.shape = {.num_ranks = 1024, .node_size = 8};
  EXPECT_TRUE(CheckReach(options, 1).ok());
}

TEST(CheckReach, refuses_ll_rows_that_no_command_carries) {
  SessionOptions options;
  options.name = "g";
  // 16 MiB with the scalars of K = 1.
  options.shape = {.num_ranks = 16, .node_size = 8, .hidden = (uint64_t{1} << 22) - 4};
  options.shape.ll_tokens = 1;
  EXPECT_TRUE(CheckReach(options, 1).ok());
  options.shape.hidden += 1;
  EXPECT_NE(CheckReach(options, 1)
                .message()
                .find("got rows of 16777232 bytes in combine, expected "
                      "at most 16777216 in mode ll between nodes"),
            std::string::npos);
  options.shape.ll_tokens = 0;
  EXPECT_TRUE(CheckReach(options, 1).ok());
}

TEST(CheckReach, takes_any_size_in_one_node) {
  const SessionOptions huge = HugeGroup(8);
  EXPECT_TRUE(CheckReach(huge, uint64_t{1} << 41).ok());
}

}  // namespace
}  // namespace jax_ep
