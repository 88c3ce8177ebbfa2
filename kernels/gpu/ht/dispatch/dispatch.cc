// HT dispatch: every rank pulls the rows of its experts from their owners' arrays straight to their
// final places.
//
//   PullRows (lanes/pull_rows.cu, pull_rows_in_bulk.cu, with weights pull_weighted_rows.cu, of rows
//   that travel quantised pull_records.cu, pull_records_in_bulk.cu): sends the entry flag to the
//   peers, indexes the rows and waits for all entry flags (protocol/entry.h); each warp takes
//   (source, token) pairs, reads the row once and writes it to all its places; the last warps of a
//   block zero padding and fetch weights; the last block exchanges the tail flags. Over several
//   nodes it runs first for the rows of this node, then once per slice of the others' tokens
//   (network/dispatch.cu, network/token_slices.h).
#include <algorithm>
#include <string>
#include <utility>

#include "kernels/gpu/checks.h"
#include "kernels/gpu/ht/dispatch/pull_params.h"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/network/launchers.h"

namespace jax_ep::gpu {
namespace {

const char* LaunchPull(RankHandle& rank, const PullParams& params, cudaStream_t stream) {
  if (params.x != nullptr) {
#if JAX_EP_BULK_COPIES
    const char* error = nullptr;
    if (rank.use_bulk_copies && LaunchPullRecordsInBulk(rank, params, stream, &error)) return error;
#endif
    return LaunchPullRecords(rank, params, stream);
  }
  if (params.row_weights != nullptr || params.recv_dots != nullptr) {
    return LaunchPullWeightedRows(rank, params, stream);
  }
#if JAX_EP_BULK_COPIES
  if (rank.use_bulk_copies && params.is_vectorised) {
    return LaunchPullRowsInBulk(rank, params, stream);
  }
#endif
  return LaunchPullRows(params, stream);
}

// All rows of this node's ranks at once, whatever the slices.
const char* LaunchPullOfMates(RankHandle& rank, const PullParams& call, cudaStream_t stream) {
  if (call.recv_x == nullptr && call.recv_dots == nullptr) return nullptr;
  PullParams params = call;
  params.sources = Sources::kMates;
  params.entry.is_of_mates = true;
  params.slice = {.end = call.num_tokens};
  const bool only_copies =
      call.x == nullptr && call.row_weights == nullptr && call.recv_dots == nullptr;
  if (only_copies) params.max_blocks = std::min(params.max_blocks, BlocksBesideWire(rank));
  return LaunchPull(rank, params, stream);
}

// What is different where rows travel as records.
void TakeRecords(const RankHandle& rank, const DispatchParams& call, PullParams& params) {
  const GroupShape& shape = rank.device.shape;
  const Fp8Wire& wire = call.wire;
  params.x = call.x;
  params.format = FormatOf(shape.hidden, wire.block, wire.scale);
  params.wire_bytes = RecordBytes(shape.hidden, wire.block, wire.scale);
  if (wire.recv_scales != nullptr) params.row_bytes = shape.hidden;
  params.scales = {
      .scales = wire.recv_scales,
      .num_blocks = params.format.num_blocks(),
      .rows_in_column = wire.scales_in_columns
                            ? RowsOfMatrix(shape, call.layout, call.num_tokens, params.recv_rows)
                            : 0};
  if (!rank.has_budget) return;
  const int64_t num_rows =
      call.zero_padding ? call.recv_rows : MeanRows(shape, call.num_tokens, call.recv_rows);
  params.max_blocks = std::min(
      rank.num_sms, SmsForRecords(shape, params.num_tokens, static_cast<uint64_t>(num_rows),
                                  params.wire_bytes, params.row_bytes));
}

}  // namespace

const char* PrepareDispatchKernels(const RankHandle& rank) {
  if (const char* error = PreparePullRows(rank)) return error;
  if (const char* error = PreparePullRecords(rank)) return error;
#if JAX_EP_BULK_COPIES
  if (rank.use_bulk_copies) {
    if (const char* error = PreparePullRowsInBulk(rank)) return error;
    if (const char* error = PreparePullRecordsInBulk(rank)) return error;
  }
#endif
  return PreparePullWeightedRows(rank);
}

const char* LaunchDispatch(RankHandle& rank, const DispatchParams& call, cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  if (std::string wrong = CheckDispatch(shape, call); !wrong.empty()) {
    return KeepText("dispatch: " + std::move(wrong));
  }
  const bool has_records = call.wire.block != 0;
  Entry entry;
  if (const char* error =
          PrepareEntry(rank,
                       {.operation = Operation::kDispatch,
                        .recv_src = call.recv_src.data(),
                        .recv_rows = static_cast<uint64_t>(call.recv_rows),
                        .num_tokens = static_cast<uint64_t>(call.num_tokens),
                        .x = has_records || call.recv_x == nullptr ? nullptr : call.x,
                        .weights = call.weights.data()},
                       entry, stream)) {
    return error;
  }
  const auto num_tokens = static_cast<uint64_t>(call.num_tokens);
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  const bool is_weighted = !call.row_weights.empty() || !call.recv_dots.empty();
  const RowWork work = is_weighted ? RowWork::kWeight : RowWork::kStore;
  const int64_t num_rows =
      call.zero_padding ? call.recv_rows : MeanRows(shape, call.num_tokens, call.recv_rows);
  PullParams params{.device = rank.device,
                    .entry = entry,
                    .layout = call.layout,
                    .zero_padding = call.zero_padding,
                    .is_vectorised = HasWholeWords(row_bytes, {call.recv_x, call.y}),
                    .num_tokens = num_tokens,
                    .recv_rows = static_cast<uint64_t>(call.recv_rows),
                    .row_bytes = row_bytes,
                    .wire_bytes = row_bytes,
                    .max_blocks = MostBlocks(rank, work, call.num_tokens, num_rows),
                    .recv_src = call.recv_src.data(),
                    .recv_topk_idx = call.recv_topk_idx.data(),
                    .recv_x = call.recv_x,
                    .recv_weights = DataOrNull(call.recv_weights),
                    .y = call.y,
                    .row_weights = DataOrNull(call.row_weights),
                    .recv_dots = DataOrNull(call.recv_dots)};
  if (has_records) TakeRecords(rank, call, params);
  const TokenCut cut = CutOf(rank, num_tokens, call.recv_x != nullptr ? row_bytes : 0);
  const bool is_between_nodes = shape.num_nodes() > 1;
  const auto send = [&](const SliceSpan& slices) {
    return is_between_nodes ? LaunchSendRows(rank, call, slices, stream) : nullptr;
  };
  const auto use = [&](const TokenSlice& slice) {
    if (is_between_nodes && slice.IsFirst()) {
      if (const char* error = LaunchPullOfMates(rank, params, stream)) return error;
    }
    params.slice = slice;
    params.sources = is_between_nodes ? Sources::kOthers : Sources::kAll;
    const char* error = is_between_nodes ? LaunchAwaitRows(rank, slice, stream) : nullptr;
    return error != nullptr ? error : LaunchPull(rank, params, stream);
  };
  return cut.ForEachSlice(/*sends_round=*/true, send, use);
}

}  // namespace jax_ep::gpu
