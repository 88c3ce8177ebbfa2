// LL dispatch: every rank pushes its rows into the slot [source][token] of each destination's set,
// once per destination rank; the destination packs them to the layout. With routing aboard each
// rank gets all expert ids and makes the plan from them, so there is no other exchange.
//
//   One kernel. The first blocks send: ids and weights to each peer, in tagged words, and pieces of
//   rows, each with a flag. The other blocks receive: they wait for the ids of all peers
//   (rank_major: of their own tokens), make the plan, and wait for the flag of each piece before
//   they place it; the first of them only adds up the plan's totals. Senders wait for nobody but
//   for the readers of an older use of the set (slot_sets.cuh); receivers come later in the grid.
//   start is a kernel of senders, done one of receivers. A whole call reads its own rows in place;
//   a start pushes them to its own set as well. Over several nodes a whole call is a start and a
//   done, or several (network/ll_calls.cc). What crosses nodes is sent by a kernel before the start
//   (network/slots.cu), and taken in by the first blocks of the done (network/take_records.cuh).
#include <algorithm>

#include "kernels/gpu/launch.h"
#include "kernels/gpu/ll/dispatch/copy_rows.cuh"
#include "kernels/gpu/ll/dispatch/kernel.cuh"
#include "kernels/gpu/ll/dispatch/send_records.cuh"
#include "kernels/gpu/network/launchers.h"
#include "kernels/gpu/sm_budget.h"

namespace jax_ep::gpu {
namespace {

using namespace ll;

template <typename Elem>
Kernel WeightedKernelOf(bool is_vectorised) {
  return is_vectorised ? &LlDispatch<WeightedRows<Elem, true>>
                       : &LlDispatch<WeightedRows<Elem, false>>;
}

Kernel KernelOf(ElemType type, bool is_vectorised, bool is_weighted) {
  if (!is_weighted) {
    if (is_vectorised) return &LlDispatch<PlainRows<uint4>>;
    return type == ElemType::kF32 ? &LlDispatch<PlainRows<uint32_t>>
                                  : &LlDispatch<PlainRows<uint16_t>>;
  }
  return WithElem(type, [&]<typename Elem>() { return WeightedKernelOf<Elem>(is_vectorised); });
}

// Bytes of dynamic shared memory that a block may have beside the kernel's static ones.
uint64_t MostSharedBytes(const RankHandle& rank) {
  constexpr uint64_t kRest = 256;
  return rank.shared_bytes_per_block - kWarps * (sizeof(PlacedRows) + sizeof(uint64_t)) -
         sizeof(BulkRows) - sizeof(LlPlanTotals) - kRest;
}

uint32_t HistogramsOf(const RankHandle& rank) {
  const uint32_t experts = rank.device.shape.num_experts;
  for (uint32_t count = kWarps; count > 0; --count) {
    if (LlPlanSharedInts(experts, count) * sizeof(int32_t) <= MostSharedBytes(rank)) return count;
  }
  return 0;
}

// 0: it has no room.
uint64_t BatchedPlanBytes(const RankHandle& rank) {
  const GroupShape& shape = rank.device.shape;
  const uint64_t bytes = BatchedPlanSharedInts(shape, shape.ll_tokens) * sizeof(int32_t);
  return CanPlanBatched(shape) && bytes <= MostSharedBytes(rank) ? bytes : 0;
}

// Shared memory of the plan.
uint64_t PlanBytes(const RankHandle& rank) {
  const uint32_t experts = rank.device.shape.num_experts;
  const uint64_t bytes = std::max(LlPlanSharedInts(experts, HistogramsOf(rank)) * sizeof(int32_t),
                                  BatchedPlanBytes(rank));
  constexpr uint64_t kBulkAlign = 128;
  return AlignUp(bytes, kBulkAlign);
}

// Rows of `row_bytes`, `most` at most, that a block has room for beside `other_bytes` in its shared
// memory.
uint32_t BulkRowsOf(const RankHandle& rank, uint64_t row_bytes, uint64_t other_bytes,
                    uint32_t most) {
  if (!rank.use_bulk_copies || row_bytes % kWireUnitBytes != 0) return 0;
  const uint64_t available = MostSharedBytes(rank);
  if (available < other_bytes) return 0;
  return static_cast<uint32_t>(std::min<uint64_t>((available - other_bytes) / row_bytes, most));
}
constexpr uint32_t kMostSendWarps = 4;    // few, so that rows arrive one after the other
constexpr uint32_t kMostPlaceWarps = 12;  // the others write what no row fills

}  // namespace

const char* PrepareLlDispatchKernels(const RankHandle& rank) {
  const GroupShape& shape = rank.device.shape;
  if (shape.ll_tokens == 0) return nullptr;
  if (HistogramsOf(rank) == 0) {
    return KeepText("got " + std::to_string(shape.num_experts) +
                    " experts, more than this device's shared memory has room for in mode ll");
  }
  // Of any call: one of smaller sizes (a view's) may have room for more rows.
  const auto most_bytes = static_cast<uint32_t>(MostSharedBytes(rank));
  for (const bool is_vectorised : {false, true}) {
    for (const bool is_weighted : {false, true}) {
      const Kernel kernel = KernelOf(shape.elem_type, is_vectorised, is_weighted);
      if (const char* error = PrepareKernel(kernel, most_bytes)) return error;
    }
  }
  for (const bool are_split : {false, true}) {
    const Kernel kernel = RecordKernelOf(shape.elem_type, are_split);
    if (const char* error = PrepareKernel(kernel, most_bytes)) return error;
  }
  return nullptr;
}

const char* LaunchLlDispatch(RankHandle& rank, const PlanParams* plan, const DispatchParams& call,
                             const LlRound& round, CallPart part, const int32_t* epoch_in,
                             int32_t* epoch_out, cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  const bool has_network = shape.num_nodes() > 1;
  const bool is_routed = plan != nullptr && !round.is_planned;
  const bool has_records = call.wire.block != 0;
  const uint64_t x_bytes = shape.hidden * ElemBytes(shape.elem_type);
  const uint64_t row_bytes =
      has_records && call.wire.recv_scales != nullptr ? shape.hidden : x_bytes;
  const uint64_t wire_bytes =
      has_records ? RecordBytes(shape.hidden, call.wire.block, call.wire.scale) : x_bytes;
  const bool is_vectorised = has_records || HasWholeWords(x_bytes, {call.x, call.recv_x, call.y});
  const uint64_t word_bytes = is_vectorised ? sizeof(uint4) : ElemBytes(shape.elem_type);
  constexpr uint64_t kPieceBytes = 4096;
  const RecordFormat format =
      has_records ? FormatOf(shape.hidden, call.wire.block, call.wire.scale) : RecordFormat{};
  const bool is_weighted =
      part != CallPart::kStart && (!call.row_weights.empty() || !call.recv_dots.empty());
  const bool is_tagged =
      part == CallPart::kWhole && !is_weighted && call.recv_x != nullptr &&
      TravelsTagged(rank.device, static_cast<uint64_t>(call.num_tokens), x_bytes);
  // Tagged records: a unit for each lane, so that many warps quantise a row.
  const auto num_tokens = static_cast<uint64_t>(call.num_tokens);
  const uint64_t record_pieces = is_tagged ? DivideUp(uint64_t{format.num_units}, kWarpSize)
                                 : part == CallPart::kWhole ? LlRecordPieces(num_tokens, x_bytes)
                                                            : DivideUp(x_bytes, kPieceBytes);
  const Pieces pieces =
      has_records ? CutUnits(format, record_pieces)
                  : CutRow(shape, x_bytes, is_tagged ? kTaggedPieceBytes : kPieceBytes, word_bytes);

  LlDispatchKernelParams params{
      .device = rank.device,
      .part = part,
      .is_routed = is_routed,
      .zero_padding = call.zero_padding,
      .is_tagged = is_tagged,
      .pieces = pieces,
      .row_words = has_records ? format.num_units : static_cast<uint32_t>(x_bytes / word_bytes),
      .row_bytes = row_bytes,
      .x_bytes = x_bytes,
      .wire_bytes = wire_bytes,
      .slot_bytes = has_records ? PieceSlotBytes(pieces, format) : wire_bytes,
      .x = call.x,
      .weights = DataOrNull(call.weights),
      .given_slots = call.send_slot.data(),
      .rank_ids = is_routed ? shape.experts_per_rank() : shape.num_ranks * round.call_tokens,
      .round = round,
      .format = format,
      .scales = {.scales = call.wire.recv_scales, .num_blocks = format.num_blocks()},
      .epoch_in = epoch_in,
      .epoch_out = epoch_out};
  const bool is_start = part == CallPart::kStart;
  params.operation = part == CallPart::kWhole ? Operation::kLlDispatch
                     : is_start               ? Operation::kLlDispatchStart
                                              : Operation::kLlDispatchDone;
  params.start_operation =
      part == CallPart::kWhole ? Operation::kLlDispatch : Operation::kLlDispatchStart;
  params.has_rows = is_start ? call.x != nullptr : call.recv_x != nullptr;
  params.has_weights = is_start ? !call.weights.empty() : !call.recv_weights.empty();
  LlPlanParams& planner = params.plan;
  planner.layout = plan != nullptr ? plan->layout : call.layout;
  planner.num_tokens = static_cast<uint32_t>(call.num_tokens);
  planner.recv_rows = static_cast<int32_t>(plan != nullptr ? plan->recv_rows : call.recv_rows);
  if (call.wire.scales_in_columns) {
    params.scales.rows_in_column = RowsOfMatrix(shape, planner.layout, call.num_tokens,
                                                static_cast<uint64_t>(planner.recv_rows));
  }
  if (planner.layout == Layout::kExpertMajor ||
      (planner.layout == Layout::kExpertBatched && BatchedPlanBytes(rank) == 0)) {
    const uint64_t num_pairs = call.num_tokens * shape.top_k * shape.num_ranks;
    planner.num_histograms =
        static_cast<uint32_t>(std::clamp<uint64_t>(num_pairs / kWarpSize, 1, HistogramsOf(rank)));
  }
  if (!is_start) {
    params.recv_x = call.recv_x;
    params.recv_weights = DataOrNull(call.recv_weights);
    params.y = call.y;
    params.row_weights = DataOrNull(call.row_weights);
    params.recv_dots = DataOrNull(call.recv_dots);
    // A given plan is only read.
    planner.out.recv_src = const_cast<int32_t*>(call.recv_src.data());
    planner.out.recv_topk_idx = const_cast<int32_t*>(call.recv_topk_idx.data());
  }
  if (plan != nullptr) {
    params.topk_idx = plan->topk_idx.data();
    planner.out = ArraysOf(plan->out);  // of a planned round they are what it follows
  }

  if (has_network && is_start) {
    const SendRecordsParams records{
        .device = rank.device,
        .operation = params.operation,
        .is_routed = params.is_routed,
        .num_tokens = planner.num_tokens,
        .rank_ids = params.rank_ids,
        .header = HeaderOf(params, params.operation, rank.device.program),
        .row_bytes = x_bytes,
        .x = params.has_rows ? params.x : nullptr,
        .ids = params.is_routed ? params.topk_idx : params.given_slots,
        .weights = params.has_weights ? params.weights : nullptr};
    if (const char* error = LaunchSendRecords(rank, records, stream)) return error;
  }
  if (has_network && part == CallPart::kDone) {
    params.taken = {.operation = params.operation,
                    .start_operation = params.start_operation,
                    .kind = kKind,
                    .num_tokens = planner.num_tokens,
                    .num_pieces = pieces.count,
                    .has_rows = params.has_rows,
                    .has_ids = is_routed,
                    .has_weights = params.has_weights};
    if (const char* error =
            PrepareToTake(rank, epoch_in, params.taken, params.num_take_blocks, stream)) {
      return error;
    }
  }
  const uint64_t num_dests = shape.num_ranks - (part == CallPart::kWhole ? 1 : 0);
  if (is_vectorised && part == CallPart::kWhole && num_dests > 0 && !is_tagged) {
    const uint32_t most = has_records ? kMostRecordSendWarps : kMostSendWarps;
    params.num_bulk_warps = BulkRowsOf(rank, params.slot_bytes, 0, most * kSendSlots) / kSendSlots;
  }
  constexpr int64_t kFewestPlaced = 64;  // measured: lanes place fewer tokens as quickly
  static_assert(kFewestPlaced > static_cast<int64_t>(kMostTaggedTokens),
                "bulk copies wait for flags");
  if (is_vectorised && !is_start && call.recv_x != nullptr && !is_weighted && !has_records &&
      call.num_tokens >= kFewestPlaced) {
    params.num_place_warps = BulkRowsOf(rank, row_bytes, PlanBytes(rank), kMostPlaceWarps);
    params.place_offset = static_cast<uint32_t>(PlanBytes(rank));
  }
  const uint64_t word_items = NumWordItems(params);
  // Bulk senders take a token each, or a piece that they quantise.
  const uint64_t num_pieces = static_cast<uint64_t>(call.num_tokens) * pieces.count;
  const uint64_t num_sent = has_records ? num_pieces : static_cast<uint64_t>(call.num_tokens);
  const uint64_t row_items =
      params.num_bulk_warps > 0 ? num_sent * kWarps / params.num_bulk_warps : num_pieces;
  const uint64_t send_items = word_items + (params.has_rows ? row_items : 0);
  // Of few tokens, which leave SMs idle: a block places pieces with half of its warps.
  const uint64_t receive_items =
      std::max<uint64_t>(num_pieces * shape.num_ranks * (has_records ? 2 : 1),
                         static_cast<uint64_t>(planner.recv_rows) / kWarpSize);
  const auto blocks_for = [](uint64_t items, uint32_t most) {
    return BlocksFor(items, kWarps, most);
  };
  constexpr uint32_t kTaggedSpread = 4;  // few items, which leave SMs idle
  const uint32_t most_senders =
      has_records ? LlQuantizeBlocks(rank.ll_blocks, num_pieces, params.num_bulk_warps)
                  : LlSendBlocks(rank.ll_blocks, shape, planner.layout, planner.num_tokens,
                                 params.num_bulk_warps);
  // Totals take long where there are many pairs, so a block has nothing else to do.
  constexpr uint32_t kFewestBlocks = 8;
  params.has_totals_block = !is_start && is_routed && rank.ll_blocks >= kFewestBlocks;
  const uint32_t num_totals_blocks = params.has_totals_block ? 1 : 0;
  uint32_t blocks = 0;
  switch (part) {
    case CallPart::kWhole:
      params.num_send_blocks =
          num_dests == 0
              ? 1
              : blocks_for(is_tagged ? send_items * kTaggedSpread : send_items, most_senders);
      blocks = params.num_send_blocks + num_totals_blocks +
               blocks_for(receive_items,
                          std::max(rank.ll_blocks - most_senders, 1u + num_totals_blocks) -
                              num_totals_blocks);
      break;
    case CallPart::kStart:
      params.num_send_blocks = blocks = blocks_for(send_items, rank.ll_blocks);
      break;
    case CallPart::kDone:
      blocks =
          params.num_take_blocks + num_totals_blocks +
          blocks_for(receive_items, rank.ll_blocks - params.num_take_blocks - num_totals_blocks);
      break;
  }
  const auto shared_bytes =
      static_cast<uint32_t>(std::max(params.num_bulk_warps * kSendSlots * params.slot_bytes,
                                     PlanBytes(rank) + params.num_place_warps * row_bytes));
  const Kernel kernel = has_records
                            ? RecordKernelOf(shape.elem_type, call.wire.recv_scales != nullptr)
                            : KernelOf(shape.elem_type, is_vectorised, is_weighted);
  kernel<<<blocks, kThreads, shared_bytes, stream>>>(params);
  return LaunchResult("LlDispatch");
}

}  // namespace jax_ep::gpu
