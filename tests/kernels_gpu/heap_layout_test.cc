// What a GPU rank's heap and stage take, by docs/gpu.md "Memory and SMs". Needs no GPU.
#include "kernels/gpu/protocol/heap_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "kernels/gpu/network/network.h"
#include "kernels/gpu/network/stage_layout.h"
#include "proxy/abi/command.h"

namespace jax_ep::gpu {
namespace {

// The experts of DeepSeek-V3.
GroupShape ShapeOf(uint32_t num_ranks, uint64_t max_tokens) {
  GroupShape shape;
  shape.num_ranks = shape.node_size = num_ranks;
  shape.num_experts = 256;
  shape.top_k = 8;
  shape.hidden = 7168;
  shape.max_tokens = max_tokens;
  shape.elem_type = ElemType::kBf16;
  shape.f32_partials = false;
  return shape;
}

// A partial of each token for every other rank, one stage for x, and the tables of plans: nothing
// is there once per call that may be open.
TEST(GpuHeap, ModeHtHoldsPartialsAndOneStage) {
  for (const uint32_t ranks : {1u, 2u, 4u, 8u, 64u}) {
    for (const uint64_t tokens : {uint64_t{1}, uint64_t{100}, uint64_t{4096}, uint64_t{16384}}) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(tokens) + " tokens");
      GroupShape shape = ShapeOf(ranks, tokens);
      const uint64_t bytes = GpuHeapLayout::Make(shape).total_bytes;
      const uint64_t row = shape.hidden * 2, weights = shape.top_k * 4;
      const uint64_t partials = (ranks - 1) * tokens * (row + weights);
      const uint64_t stage = tokens * (row + weights);
      const uint64_t pairs = tokens * shape.top_k;
      const uint64_t flags = ranks * ((tokens + 7) / 8 + tokens) * 8;  // chunks, records
      const uint64_t slices = 2 * ranks * MostPlanSlices(ranks) * (16 + shape.num_experts * 2);
      const uint64_t tables = pairs * (8 * ranks + 4 * 4) + flags + slices;
      const uint64_t per_expert = shape.num_experts * (600 + 8 * ranks);
      EXPECT_GE(bytes, partials + stage + tables);
      EXPECT_LE(bytes, partials + stage + tables + per_expert + (uint64_t{32} << 10));
      for (const uint32_t depth : {1u, 7u}) {
        shape.depth = depth;
        EXPECT_EQ(GpuHeapLayout::Make(shape).total_bytes, bytes);
      }
    }
  }
}

TEST(GpuHeap, OfFourRanksHas226MiBInModeHtAnd266InBoth) {
  GroupShape shape = ShapeOf(4, 4096);
  EXPECT_EQ(GpuHeapLayout::Make(shape).total_bytes >> 20, 226u);
  shape.ll_tokens = 128;
  EXPECT_EQ(GpuHeapLayout::Make(shape).total_bytes >> 20, 266u);
}

// Rounds bound what mode ht holds for other nodes, of eight ranks. docs/scale.md, "How many GB per
// rank".
TEST(GpuHeap, ModeHtIsBoundedInTheNumberOfRanks) {
  constexpr double kGiB = 1 << 30;
  for (const uint32_t ranks : {8u, 16u, 64u, 256u, 1024u}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    GroupShape shape = ShapeOf(ranks, 4096);
    shape.node_size = 8;
    shape.num_experts = std::max(256u, ranks);
    EXPECT_LE(static_cast<double>(GpuHeapLayout::Make(shape).total_bytes), 1.4 * kGiB);
    EXPECT_LE(static_cast<double>(NetLayout::Make(shape).total_bytes), 0.8 * kGiB);
    shape.f32_partials = true;
    EXPECT_LE(static_cast<double>(GpuHeapLayout::Make(shape).total_bytes), 2.3 * kGiB);
    EXPECT_LE(static_cast<double>(NetLayout::Make(shape).total_bytes), 1.2 * kGiB);
  }
}

// So is mode ll, between nodes.
TEST(GpuHeap, ModeLlIsBoundedInTheNumberOfRanks) {
  constexpr double kGiB = 1 << 30;
  for (const uint32_t ranks : {8u, 64u, 256u, 1024u}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    GroupShape shape = ShapeOf(ranks, 128);
    shape.ll_tokens = 128;
    shape.has_ht = false;
    shape.node_size = 8;
    shape.num_experts = std::max(256u, ranks);
    EXPECT_LE(static_cast<double>(GpuHeapLayout::Make(shape).total_bytes), 0.6 * kGiB);
    EXPECT_LE(static_cast<double>(NetLayout::Make(shape).total_bytes), 0.7 * kGiB);
    // The largest calls: ids and weights of all tokens, and an index of their pairs.
    shape.max_tokens = shape.ll_tokens = 512;
    EXPECT_LE(static_cast<double>(GpuHeapLayout::Make(shape).total_bytes), 0.7 * kGiB);
    EXPECT_LE(static_cast<double>(NetLayout::Make(shape).total_bytes), 0.8 * kGiB);
  }
}

TEST(GpuHeap, OnlyCallsBetweenNodesTakeRoundsInModeLl) {
  GroupShape shape = ShapeOf(64, 128);
  shape.ll_tokens = 4096;
  EXPECT_EQ(GpuLlRoundTokens(shape), 4096u);
  shape.node_size = 8;
  EXPECT_EQ(GpuLlRoundTokens(shape), 128u);
  shape.ll_tokens = 100;
  EXPECT_EQ(GpuLlRoundTokens(shape), 100u);
  shape.num_ranks = 1024;
  EXPECT_EQ(GpuLlRoundTokens(shape), 8u);
}

TEST(GpuHeap, TheRecordsOfARoundHaveAGroupEach) {
  for (uint32_t num_ranks = 2; num_ranks <= kMaxRanks; ++num_ranks) {
    for (const uint64_t tokens : {1, 31, 128, 129, 512, 4096, 100'000}) {
      const GroupShape shape{.num_ranks = num_ranks, .ll_tokens = tokens};
      ASSERT_LE(DivideUp(GpuLlRoundTokens(shape), uint64_t{kGroupTokens}) * num_ranks,
                kMostRecordGroups)
          << num_ranks << " ranks, " << tokens << " tokens";
    }
  }
}

// Every record begins at a line, and the last one is in the stage.
TEST(GpuHeap, TheStageHasRoomForRecordsThatBeginAtLines) {
  for (uint64_t hidden = 16; hidden <= 7168; hidden += 16) {
    GroupShape shape = ShapeOf(4, 5);
    shape.hidden = hidden;
    const GpuHeapLayout layout = GpuHeapLayout::Make(shape);
    ASSERT_EQ(layout.stage_rows % 128, 0u) << hidden;
    for (const uint64_t block : {16, 32, 64, 128, 256, 512}) {
      for (const Fp8Scale scale : {Fp8Scale::kF32, Fp8Scale::kUe8m0}) {
        const uint64_t record_bytes = RecordBytes(hidden, block, scale);
        if (hidden % block != 0 || record_bytes > hidden * 2) continue;
        const uint64_t pitch = RecordPitch(record_bytes);
        ASSERT_EQ(pitch % 128, 0u) << hidden;
        ASSERT_GE(pitch, record_bytes) << hidden;
        ASSERT_LE(layout.stage_rows + 5 * pitch, layout.stage_weights) << hidden;
      }
    }
  }
}

// A chunk of neighbours crosses as one command: checks.cc refuses what it cannot carry.
TEST(GpuHeap, ATokenTakesWhatTheLongestOfItsRecordsTakes) {
  GroupShape shape = ShapeOf(4, 128);
  shape.node_size = 2;
  shape.top_k = 64;
  shape.ll_tokens = 128;
  const auto bytes_of = [&shape] { return MostTokenBytes(NetLayout::Make(shape), shape); };
  const uint64_t row = shape.hidden * 2;
  EXPECT_EQ(bytes_of(), row + 64 * sizeof(float) + kWireUnitBytes);  // a partial with its scalars
  shape.f32_partials = true;
  EXPECT_EQ(bytes_of(), 2 * row + 64 * sizeof(float) + kWireUnitBytes);
  shape.ll_tokens = 0;
  EXPECT_EQ(bytes_of(), 2 * row);
  // Rows that fill a command take no scalars with them.
  const uint64_t most = kMaxCommandBytes / kNetChunkTokens;
  shape.hidden = most / 4;
  EXPECT_EQ(bytes_of(), most);
  shape.ll_tokens = 128;
  EXPECT_GT(bytes_of(), most);
}

// Sets of mode ll multiply; what mode ht takes beside them does not.
TEST(GpuHeap, OnlyModeLlTakesMoreForMoreStarts) {
  GroupShape shape = ShapeOf(4, 4096);
  shape.ll_tokens = 128;
  const auto bytes_of = [&](uint32_t depth) {
    shape.depth = depth;
    return GpuHeapLayout::Make(shape).total_bytes;
  };
  const uint64_t one = bytes_of(2) - bytes_of(1);
  EXPECT_EQ(bytes_of(7) - bytes_of(6), one);
  // Of dispatch and combine, by source; those of few tokens in tagged words as well.
  const uint64_t rows = uint64_t{2} * 4 * (128 + kMostTaggedTokens * 5 / 3) * 7168 * 2;
  EXPECT_GE(one, rows);
  EXPECT_LE(one, rows * 11 / 10);
}

// They take twice the bytes of their rows, a third more than partials, so neither many tokens nor
// many ranks have them.
TEST(GpuHeap, FewTokensOfFewRanksHaveRoomForTaggedWords) {
  const auto tokens_of = [](GroupShape shape, uint64_t ll_tokens) {
    shape.ll_tokens = ll_tokens;
    return GpuHeapLayout::Make(shape).tagged_tokens;
  };
  EXPECT_EQ(tokens_of(ShapeOf(4, 4096), 128), kMostTaggedTokens);
  EXPECT_EQ(tokens_of(ShapeOf(4, 4096), 3), 3u);
  EXPECT_EQ(tokens_of(ShapeOf(4, 4096), 0), 0u);
  EXPECT_EQ(tokens_of(ShapeOf(1, 4096), 128), 0u);
  EXPECT_EQ(tokens_of(ShapeOf(kMostTaggedRanks, 4096), 128), kMostTaggedTokens);
  EXPECT_EQ(tokens_of(ShapeOf(2 * kMostTaggedRanks, 4096), 128), 0u);
  GroupShape two_nodes = ShapeOf(4, 4096);
  two_nodes.node_size = 2;
  EXPECT_EQ(tokens_of(two_nodes, 128), 0u);
}

}  // namespace
}  // namespace jax_ep::gpu
