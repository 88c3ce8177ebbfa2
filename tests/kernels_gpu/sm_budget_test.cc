// SMs of an HT call follow from its static values. Needs no GPU.
#include "kernels/gpu/sm_budget.h"

#include <gtest/gtest.h>

namespace jax_ep::gpu {
namespace {

constexpr uint64_t kTokens = 4096;

GroupShape ShapeOf(uint32_t num_ranks, uint32_t node_size) {
  GroupShape shape;
  shape.num_ranks = num_ranks;
  shape.node_size = node_size;
  shape.num_experts = 256;
  shape.top_k = 8;
  return shape;
}

uint32_t Sms(RowWork work, uint32_t num_ranks, double capacity) {
  const auto rows = static_cast<uint64_t>(capacity * kTokens * 8);
  return SmsFor(work, ShapeOf(num_ranks, num_ranks), kTokens, rows);
}

// Two GPUs: each token is wanted here and there, so the wire carries few of the rows. Four: the
// wire is the bound, and SMs beyond those that feed it bring nothing.
TEST(SmBudget, FollowsTheRatioOfRowsToWire) {
  EXPECT_EQ(Sms(RowWork::kStore, 2, 1.25), 64u);
  EXPECT_EQ(Sms(RowWork::kWeight, 2, 1.25), 64u);
  EXPECT_EQ(Sms(RowWork::kStore, 4, 1.25), 26u);
  EXPECT_EQ(Sms(RowWork::kSum, 2, 1.0), 64u);
  EXPECT_EQ(Sms(RowWork::kSum, 4, 1.25), 48u);
  EXPECT_EQ(Sms(RowWork::kWeight, 4, 1.25), 42u);
  EXPECT_EQ(Sms(RowWork::kStore, 16, 1.25), 24u);
}

// Room for skewed routing is room for a rank that receives several times the mean.
TEST(SmBudget, GrowsWithTheCapacity) {
  EXPECT_EQ(Sms(RowWork::kStore, 4, 3.4), 64u);
  for (const RowWork work : {RowWork::kStore, RowWork::kSum, RowWork::kWeight}) {
    for (uint32_t ranks = 2; ranks <= 64; ranks *= 2) {
      uint32_t before = FewestSmsFor(work);
      for (double capacity = 0.5; capacity < 64; capacity *= 1.5) {
        const uint32_t sms = Sms(work, ranks, capacity);
        EXPECT_GE(sms, before) << ranks << " ranks, capacity " << capacity;
        EXPECT_LE(sms, kMostSms);
        before = sms;
      }
      EXPECT_EQ(before, kMostSms) << ranks << " ranks";
    }
  }
}

TEST(SmBudget, HasBoundsWithoutRowsOrWire) {
  const GroupShape alone = ShapeOf(1, 1);
  EXPECT_EQ(SmsFor(RowWork::kStore, alone, kTokens, kTokens), kMostSms);
  EXPECT_EQ(SmsFor(RowWork::kStore, alone, 0, 0), kMostSms);
  EXPECT_EQ(SmsFor(RowWork::kSum, ShapeOf(4, 4), kTokens, 0), FewestSmsFor(RowWork::kSum));
  EXPECT_EQ(SmsBetweenNodes(/*has_fast_wire=*/false), kFewestSms);
  EXPECT_EQ(SmsBetweenNodes(/*has_fast_wire=*/true), kMostSms);
}

// Two GPUs: partials have four rows, so a block makes half as many in a time as with four GPUs.
TEST(SmBudget, MorePartialBlocksWherePartialsHaveMoreRows) {
  constexpr uint64_t kBytesAtOnce = 28 << 10;
  const auto blocks_of = [](GroupShape shape, uint64_t num_rows, uint32_t blocks = 64,
                            bool f32_partials = false) {
    shape.elem_type = ElemType::kBf16;
    shape.f32_partials = f32_partials;
    return PartialBlocks(blocks, kBytesAtOnce, RowsPerPartial(shape, kTokens, num_rows));
  };
  const GroupShape two = ShapeOf(2, 2);
  EXPECT_EQ(blocks_of(ShapeOf(4, 4), 8 * kTokens), 12u);
  EXPECT_EQ(blocks_of(two, 8 * kTokens), 22u);
  EXPECT_EQ(blocks_of(two, 2 * kTokens), 12u);  // rank_major: a row each
  EXPECT_EQ(blocks_of(ShapeOf(16, 16), 8 * kTokens), 12u);
  EXPECT_EQ(blocks_of(two, 8 * kTokens, 64, /*f32_partials=*/true), 12u);  // twice the bytes
  EXPECT_EQ(blocks_of(two, 8 * kTokens, 24), 18u);
  EXPECT_EQ(blocks_of(two, 8 * kTokens, 1), 1u);
  EXPECT_EQ(blocks_of(ShapeOf(1, 1), 8 * kTokens), 12u);
  EXPECT_EQ(RowsPerPartial(two, 0, 0), 1.0);
}

TEST(SmBudget, LlSendersByRankSendAllRowsAtOnceIfFewBlocksSuffice) {
  const auto blocks_of = [](uint64_t num_tokens, uint32_t blocks = 100) {
    return LlSendBlocks(blocks, ShapeOf(2, 2), Layout::kRankMajor, num_tokens, 4);
  };
  EXPECT_EQ(blocks_of(1), 25u);
  EXPECT_EQ(blocks_of(100), 25u);
  EXPECT_EQ(blocks_of(101), 26u);
  EXPECT_EQ(blocks_of(128), 32u);
  EXPECT_EQ(blocks_of(148), 37u);
  EXPECT_EQ(blocks_of(149), 25u);  // two rounds in any case
  EXPECT_EQ(blocks_of(128, 64), 16u);
  EXPECT_EQ(blocks_of(128, 1), 1u);
  EXPECT_EQ(LlSendBlocks(100, ShapeOf(4, 4), Layout::kRankMajor, 128, 4), 25u);
  EXPECT_EQ(LlSendBlocks(100, ShapeOf(2, 2), Layout::kExpertBatched, 128, 4), 25u);
  EXPECT_EQ(LlSendBlocks(100, ShapeOf(2, 2), Layout::kRankMajor, 128, 0), 25u);
}

TEST(SmBudget, FewPartialsHaveABlockEach) {
  EXPECT_EQ(PartialTeams(16, 16, 2), 1u);
  EXPECT_EQ(PartialTeams(17, 16, 2), 2u);
  EXPECT_EQ(PartialTeams(0, 1, 3), 1u);
}

TEST(SmBudget, OfQuantizingSendersIsWhatTheirRoundsTake) {
  EXPECT_EQ(LlQuantizeBlocks(100, 64 * 4, 12), 22u);
  EXPECT_EQ(LlQuantizeBlocks(100, 128 * 3, 12), 32u);
  EXPECT_EQ(LlQuantizeBlocks(100, 37 * 12, 12), 37u);
  EXPECT_EQ(LlQuantizeBlocks(100, 37 * 12 + 1, 12), 19u);  // in two rounds
  EXPECT_EQ(LlQuantizeBlocks(100, 256 * 2, 12), 22u);
  EXPECT_EQ(LlQuantizeBlocks(100, 512, 0), 37u);  // by lanes
  EXPECT_EQ(LlQuantizeBlocks(1, 512, 12), 1u);
}

TEST(SmBudget, APieceOfARecordIsAsSmallAsOneRoundAllows) {
  const auto pieces_of = [](uint64_t num_tokens, uint64_t row_bytes = 14336) {
    return LlRecordPieces(num_tokens, row_bytes);
  };
  EXPECT_EQ(pieces_of(1), 4u);
  EXPECT_EQ(pieces_of(111), 4u);
  EXPECT_EQ(pieces_of(112), 3u);
  EXPECT_EQ(pieces_of(148), 3u);
  EXPECT_EQ(pieces_of(149), 2u);
  EXPECT_EQ(pieces_of(4096), 2u);
  EXPECT_EQ(pieces_of(4096, 65536), 8u);
  EXPECT_EQ(pieces_of(128, 4096), 1u);
  EXPECT_EQ(pieces_of(128, 16), 1u);
}

// Half the bytes on the wire, and rows to quantise: more SMs than plain rows have.
TEST(SmBudget, OfRecordsGrowsWithWhatIsStored) {
  GroupShape shape = ShapeOf(4, 4);
  shape.hidden = 7168;
  shape.elem_type = ElemType::kBf16;
  const uint64_t wire_bytes = RecordBytes(shape.hidden, 128, Fp8Scale::kF32);
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  const uint64_t rows = 4 * uint64_t{kTokens};  // one per token and rank
  const uint32_t split = SmsForRecords(shape, kTokens, rows, wire_bytes, shape.hidden);
  const uint32_t whole = SmsForRecords(shape, kTokens, rows, wire_bytes, row_bytes);
  EXPECT_GT(split, kFewestSms);
  EXPECT_GT(whole, split);
  EXPECT_LT(whole, kMostSms);
  EXPECT_EQ(SmsForRecords(shape, kTokens, 10 * kTokens, wire_bytes, row_bytes), kMostSms);
  EXPECT_EQ(SmsForRecords(ShapeOf(1, 1), kTokens, rows, wire_bytes, row_bytes), kMostSms);
}

}  // namespace
}  // namespace jax_ep::gpu
