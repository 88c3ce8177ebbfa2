// HT combine: every rank sums the rows that it has of a token, weighted, and stores the one partial
// into the token owner's reduce area; the owner adds the partials along the fixed tree.
//
//   CombineRows (combine_rows_in_bulk.cu, without bulk copies lanes/combine_rows.cu): entry flag
//   (peers are through with the last combine, so their reduce areas are free) and row index
//   (protocol/entry.h); partials of other owners' tokens, chunk by chunk, and the sums of own
//   tokens.
//   Scalars without rows have a shorter way (combine_scalars.cu).
//   Over several nodes the kernels of network/combine.cu run instead.
#include <algorithm>
#include <string>
#include <utility>

#include "kernels/gpu/checks.h"
#include "kernels/gpu/ht/combine/combine_params.h"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/network/launchers.h"

namespace jax_ep::gpu {

const char* PrepareCombineKernels(const RankHandle& rank) {
  if (const char* error = PrepareCombineScalars(rank)) return error;
  if (const char* error = PrepareCombineRows(rank)) return error;
#if JAX_EP_BULK_COPIES
  if (rank.use_bulk_copies) return PrepareCombineRowsInBulk(rank);
#endif
  return nullptr;
}

const char* LaunchCombine(RankHandle& rank, const CombineParams& call, cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  if (std::string wrong = CheckCombine(shape, call); !wrong.empty()) {
    return KeepText("combine: " + std::move(wrong));
  }
  Entry entry;
  if (const char* error = PrepareEntry(rank,
                                       {.operation = Operation::kCombine,
                                        .recv_src = call.recv_src.data(),
                                        .recv_rows = static_cast<uint64_t>(call.recv_rows),
                                        .num_tokens = static_cast<uint64_t>(call.num_tokens)},
                                       entry, stream)) {
    return error;
  }
  const auto num_tokens = static_cast<uint32_t>(call.num_tokens);
  const int64_t mean_rows = MeanRows(shape, call.num_tokens, call.recv_rows);
  CombineKernelParams params{
      .device = rank.device,
      .entry = entry,
      .layout = call.layout,
      .num_tokens = num_tokens,
      .num_chunks = static_cast<uint32_t>(DivideUp(num_tokens, kChunkTokens)),
      .max_blocks = MostBlocks(rank, RowWork::kSum, call.num_tokens, mean_rows),
      .mean_rows = static_cast<uint64_t>(mean_rows),
      .recv_rows = static_cast<uint32_t>(call.recv_rows),
      .rank_rows = static_cast<int32_t>(std::max<int64_t>(call.recv_rows, 1)),
      .row_bytes = shape.hidden * ElemBytes(shape.elem_type),
      .y = call.y,
      .row_weights = DataOrNull(call.row_weights),
      .pair_scalars = DataOrNull(call.pair_scalars),
      .send_slot = call.send_slot.data(),
      .out = call.y != nullptr ? call.out : nullptr,
      .pair_scalars_out = DataOrNull(call.pair_scalars_out)};
  const bool is_vectorised = HasWholeWords(params.row_bytes, {call.y, call.out});
  if (shape.num_nodes() > 1) return LaunchNetCombine(rank, params, is_vectorised, stream);
  const bool has_scalars = params.pair_scalars != nullptr || params.recv_rows == 0;
  if (params.y == nullptr && params.pair_scalars_out != nullptr && has_scalars) {
    return LaunchCombineScalars(params, stream);
  }
#if JAX_EP_BULK_COPIES
  if (rank.use_bulk_copies && is_vectorised) return LaunchCombineRowsInBulk(rank, params, stream);
#endif
  return LaunchCombineRows(rank, params, is_vectorised, stream);
}

}  // namespace jax_ep::gpu
