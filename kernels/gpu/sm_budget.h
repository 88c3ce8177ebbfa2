// How many SMs (blocks) an HT call gets where JAX_EP_GPU_SMS does not say, and how calls divide
// those that they have.
//
// A call ends when the wire is through with the rows that leave, and the SMs with those that stay:
// each SM moves so many bytes a second and no more. SMs that have to wait for the wire are better
// left to the model's own kernels; too few let the wire wait. What decides is the ratio of rows
// that this rank handles to rows that cross the wire. Both are static, so that a captured call can
// keep its grid: R where padding is zeroed, else the rows that come if routing is uniform
// (MeanRows). Between nodes the network decides (SmsBetweenNodes, kSmsBesideWire).
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/layout.h"

namespace jax_ep::gpu {

inline constexpr uint32_t kFewestSms = 24;
inline constexpr uint32_t kMostSms = 64;

// What an SM does with each row.
enum class RowWork : uint8_t { kStore, kSum, kWeight };

// A combine ends with the sums that wait for the last partials, which more SMs do sooner: by rank
// on two H100 228 us with 24, 209 with 32, 203 with 48, 201 with 64. On four H200, where the wire
// takes longer, 521 with 24 and 522 with 132.
constexpr uint32_t FewestSmsFor(RowWork work) { return work == RowWork::kSum ? 48 : kFewestSms; }

// SMs that handle a row in the time in which the wire moves one. Measured on H200 with NVLink 4
// (docs/performance.md): the wire 313 GB/s, an SM 56 GB/s of stores, 35 GB/s of rows that are
// weighted and multiplied. A block that makes partials adds 71 GB/s of rows; for a whole combine,
// whose blocks also wait for partials, 49 GB/s give two GPUs 64 SMs: 225 us with 48, 215 with 64.
// An older chip has less of all.
constexpr double SmsPerWire(RowWork work) {
  switch (work) {
    case RowWork::kStore:
      return 313.0 / 56;
    case RowWork::kSum:
      return 313.0 / 49;
    case RowWork::kWeight:
      break;
  }
  return 313.0 / 35;
}

// Rows that a rank receives over the wire, if its peers route uniformly: a token comes once,
// however many of its experts are here.
constexpr double RowsOnTheWire(const GroupShape& shape, uint64_t num_tokens) {
  double misses = 1;  // chance that no expert of a token is here
  for (uint32_t k = 0; k < shape.top_k; ++k) misses *= 1 - 1.0 / shape.num_ranks;
  return static_cast<double>((shape.num_ranks - 1) * num_tokens) * (1 - misses);
}

// Bytes of rows that a rank adds for each byte of a partial, if all ranks route uniformly and this
// one has `num_rows`. In rank_major, where a partial has one row, it may be a little more than
// that.
constexpr double RowsPerPartial(const GroupShape& shape, uint64_t num_tokens, uint64_t num_rows) {
  if (shape.num_ranks == 1 || num_tokens == 0) return 1;
  const double partials = RowsOnTheWire(shape, num_tokens) / (shape.num_ranks - 1) *
                          static_cast<double>(shape.num_ranks);
  const auto elem_bytes = static_cast<double>(ElemBytes(shape.elem_type));
  const double widening = shape.f32_partials ? sizeof(float) / elem_bytes : 1;
  return static_cast<double>(num_rows) / partials / widening;
}

// Blocks of a combine, of `blocks` >= 1, that make partials before sums: those that fill the wire.
// At least a quarter of the blocks is for the sums. A block works on `bytes_at_once`. With fewer
// the wire waits, with more a combine is slower, too: measured with NVLink 4 (docs/performance.md),
// 12 of 28 KiB are best on four H200, where a partial has 2.2 rows, and 22 on two, where it has 4.
constexpr uint32_t PartialBlocks(uint32_t blocks, uint64_t bytes_at_once, double rows_per_partial) {
  constexpr double kBytesThatFillTheWire = 12 * 28 * 1024, kRows = 2.25;
  const double needed = std::max(rows_per_partial / kRows, 1.0) * kBytesThatFillTheWire /
                        static_cast<double>(bytes_at_once);
  auto that_fill = static_cast<uint32_t>(needed);
  if (that_fill < needed) ++that_fill;
  return std::min(that_fill, blocks - blocks / 4);
}

// Teams of such a block that make partials before sums, of `num_teams`. With no more partials than
// blocks one does, so that two are not made in one block while another waits for them.
constexpr uint32_t PartialTeams(uint64_t num_partials, uint32_t blocks, uint32_t num_teams) {
  return num_partials > blocks ? num_teams : 1;
}

// Blocks of a whole ll dispatch, of `blocks`, that send its rows, measured with bench_ll. Each has
// `row_warps`, which send a row at a time; 0: lanes store them.
constexpr uint32_t LlSendBlocks(uint32_t blocks, const GroupShape& shape, Layout layout,
                                uint64_t num_tokens, uint32_t row_warps) {
  const uint32_t usual = std::max(blocks * 2 / 8, 1u);
  // By rank no receiver waits for a plan, so the last row decides. Then all rows at once are better
  // than two rounds, if that takes few blocks from those that place rows. Measured with two ranks
  // only: 128 tokens, 32 blocks of 100.
  if (layout != Layout::kRankMajor || shape.num_ranks > 2 || row_warps == 0) return usual;
  const uint64_t for_all = DivideUp(num_tokens, row_warps);
  return for_all <= blocks * 3 / 8 ? std::max(usual, static_cast<uint32_t>(for_all)) : usual;
}
// The same of a dispatch that quantises its rows: as few as send `num_pieces`, with `row_warps` of
// each, in no more rounds than three eighths of the blocks do. The others place rows.
constexpr uint32_t LlQuantizeBlocks(uint32_t blocks, uint64_t num_pieces, uint32_t row_warps) {
  const uint32_t most = std::max(blocks * 3 / 8, 1u);
  if (row_warps == 0 || num_pieces == 0) return most;
  const uint64_t at_once = uint64_t{most} * row_warps;
  const uint64_t rounds = DivideUp(num_pieces, at_once);
  const uint64_t by_block = rounds * row_warps;
  return static_cast<uint32_t>(DivideUp(num_pieces, by_block));
}

// Warps of a block that send such rows, at most: quantising takes its time.
inline constexpr uint32_t kMostRecordSendWarps = 12;

// Pieces of a row that a whole ll dispatch quantises and sends, where a warp has one at a time: as
// many as have 4 KiB of elements, but no more than all tokens' are sent in one round, or two for
// each, and none of more than 8 KiB. All ranks must choose alike, so nothing but the call's shape
// says how many; it is right for the blocks of an H200.
constexpr uint64_t LlRecordPieces(uint64_t num_tokens, uint64_t row_bytes) {
  constexpr uint64_t kAtOnce = uint64_t{37} * kMostRecordSendWarps;
  constexpr uint64_t kFewestBytes = 4096, kMostBytes = 8192;
  const uint64_t most = std::max<uint64_t>(DivideUp(row_bytes, kFewestBytes), 1);
  const uint64_t fewest = std::max<uint64_t>(DivideUp(row_bytes, kMostBytes), 2);
  const uint64_t in_one_round = kAtOnce / std::max<uint64_t>(num_tokens, 1);
  return std::min(most, std::max(in_one_round, fewest));
}

// Rows with a pair, if all ranks route uniformly.
constexpr int64_t MeanRows(const GroupShape& shape, int64_t num_tokens, int64_t recv_rows) {
  return std::min(recv_rows, num_tokens * int64_t{shape.top_k});
}

// Rows that wait for a NIC or for the host's memory need few SMs, others as many as help.
constexpr uint32_t SmsBetweenNodes(bool has_fast_wire) {
  return has_fast_wire ? kMostSms : kFewestSms;
}

// Of a dispatch between nodes, while rows cross: 230 us on two H200 with 48, 232 with 32, 235 with
// 64 and with 100.
inline constexpr uint32_t kSmsBesideWire = 48;

// Of a group of one node.
constexpr uint32_t SmsFor(RowWork work, const GroupShape& shape, uint64_t num_tokens,
                          uint64_t num_rows) {
  constexpr double kMargin = 1.25;  // SMs do not all end at once
  const double wire = RowsOnTheWire(shape, num_tokens);
  const double sms = kMargin * SmsPerWire(work) * static_cast<double>(num_rows);
  if (sms >= kMostSms * wire) return kMostSms;
  return std::max(FewestSmsFor(work), static_cast<uint32_t>(sms / wire) + 1);
}

// The same for a dispatch whose rows travel as records of `wire_bytes`: SMs quantise this rank's
// rows beside what they store (by rank on two H100: 175 us with 24 SMs, 145 with the 64 that these
// rates give).
constexpr uint32_t SmsForRecords(const GroupShape& shape, uint64_t num_tokens, uint64_t num_rows,
                                 uint64_t wire_bytes, uint64_t row_bytes) {
  constexpr double kMargin = 1.25;
  constexpr double kWire = 313, kStored = 56, kQuantised = 12;  // GB/s; the latter two of an SM
  const uint64_t x_bytes = num_tokens * shape.hidden * ElemBytes(shape.elem_type);
  const double wire = RowsOnTheWire(shape, num_tokens) * static_cast<double>(wire_bytes) / kWire;
  const double work = static_cast<double>(num_rows * row_bytes) / kStored +
                      static_cast<double>(x_bytes) / kQuantised;
  if (kMargin * work >= kMostSms * wire) return kMostSms;
  return std::max(kFewestSms, static_cast<uint32_t>(kMargin * work / wire) + 1);
}

}  // namespace jax_ep::gpu
