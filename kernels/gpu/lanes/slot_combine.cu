// Combine through slot sets, in mode ll. Every rank sums the rows that it has of a token, weighted,
// and pushes the one partial into the slot [rank][token] of the owner's set; the owner adds the
// partials along the fixed tree.
//
//   One kernel. The first blocks send pieces of partials, each with a flag; the others wait for the
//   pieces of their tokens and add them. Senders wait for nobody but for the readers of an older
//   use of the set (slot_sets.cuh); adders come later in the grid. start is a kernel of senders,
//   done one of adders. A whole call sums its own rows where it adds; a start pushes that partial
//   to its own set as well. Over several nodes a whole call is a start and a done, or several
//   (network/ll_calls.cc), and the first blocks of a done take in what crosses nodes
//   (network/take_records.cuh).
#include <algorithm>

#include "kernels/gpu/lanes/slot_combine_add.cuh"
#include "kernels/gpu/lanes/slot_combine_send.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/network/take_records.cuh"

namespace jax_ep::gpu {
namespace {

using namespace slot_combine;

// All threads of the block of a start, whole calls of one node too: other nodes have read the set's
// last use. The last block tells them first what this rank has read.
__device__ inline bool IsReadElsewhere(const SlotCombineParams& params, const CallSlot& slot,
                                       uint32_t* shared_flag) {
  const DeviceRank& device = params.device;
  if (device.network == nullptr) return true;
  if (blockIdx.x == params.num_send_blocks - 1 && WarpId() == kWarps - 1) {
    TellReads(device, params.kind, params.operation);
  }
  return BlockWaitRead(device, params.kind, params.operation, slot, shared_flag);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    SlotCombine(const __grid_constant__ SlotCombineParams params) {
  __shared__ BlockCall call;
  __shared__ uint32_t shared_flag;
  __shared__ RowList lists[kWarps];
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  const OpenEnd end(device);
  BeginCall(device, params.kind, params.part, params.operation, params.epoch_in,
            blockIdx.x < params.num_send_blocks, call);
  const CallSlot& slot = call.slot;
  if (slot.is_ok != 0) {
    if (blockIdx.x >= params.num_send_blocks + params.num_take_blocks) {
      Receive<T>(params, slot, lists[WarpId()], &shared_flag);
    } else if (params.num_take_blocks > 0) {
      BlockTakeRecords(device, params.taken, slot, blockIdx.x, &shared_flag);
    } else if (WaitReusable(device, params.kind, params.operation, call, &shared_flag) &&
               IsReadElsewhere(params, slot, &shared_flag)) {
      Send<T>(params, slot, lists[WarpId()]);
    }
  }
  FinishSlotCombine<true>(params, sequence, slot, end, &shared_flag);
}

using Kernel = void (*)(SlotCombineParams);

template <typename Elem, typename Partial>
Kernel KernelOf(uint32_t num_leaves, bool is_vectorised) {
  // Odd rows are rare, and each kernel costs seconds of the build.
  if (!is_vectorised) return &SlotCombine<SumTypes<Elem, Partial, false, kFastLevels>>;
  return num_leaves <= 1u << kFewLevels ? &SlotCombine<SumTypes<Elem, Partial, true, kFewLevels>>
                                        : &SlotCombine<SumTypes<Elem, Partial, true, kFastLevels>>;
}

Kernel KernelOf(const GroupShape& shape, bool is_vectorised) {
  return WithSumTypes(shape, [&]<typename Elem, typename Partial>() {
    return KernelOf<Elem, Partial>(RankLeaves(shape).count, is_vectorised);
  });
}

// What a warp has room for: without bulk copies of a partial, of an adder with bulk copies of those
// of all other ranks. All ranks ask for both.
bool FitsAdder(const GroupShape& shape, uint64_t row_bytes) {
  constexpr uint64_t kMostGathered = 8192;
  const uint64_t elem_bytes = ElemBytes(shape.elem_type);
  const Pieces pieces = CutRow(shape, row_bytes, kTaggedPieceBytes, elem_bytes);
  const uint64_t bytes =
      pieces.num_words * (shape.f32_partials ? uint64_t{sizeof(float)} : elem_bytes);
  return shape.num_ranks <= kMostTaggedPartials && bytes <= kMostStagedBytes &&
         (shape.num_ranks - 1) * bytes <= kMostGathered;
}

}  // namespace

const char* PrepareSlotCombineKernels(const RankHandle& rank) {
  for (const bool is_vectorised : {false, true}) {
    const Kernel kernel = KernelOf(rank.device.shape, is_vectorised);
    if (const char* error = PrepareKernel(kernel, 0)) return error;
  }
#if JAX_EP_BULK_COPIES
  if (rank.use_bulk_copies) return PrepareLlCombineKernels(rank);
#endif
  return nullptr;
}

const char* LaunchSlotCombine(RankHandle& rank, const CombineParams& call, const LlRound& round,
                              CallPart part, const int32_t* epoch_in, int32_t* epoch_out,
                              cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  const bool has_network = shape.num_nodes() > 1;
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  const bool is_vectorised = HasWholeWords(row_bytes, {call.y, call.out});
  const uint64_t word_bytes = is_vectorised ? sizeof(uint4) : ElemBytes(shape.elem_type);
  // Many tokens: warps have enough to do without small pieces, each of which costs them time.
  // Measured: docs/performance.md, LL combine.
  constexpr int64_t kManyTokens = 64;
  const bool has_scalars = !call.pair_scalars.empty() || !call.pair_scalars_out.empty();
  const bool is_tagged =
      kHasWideWords && part == CallPart::kWhole && call.y != nullptr && call.out != nullptr &&
      !has_scalars &&
      TravelsTagged(rank.device, static_cast<uint64_t>(call.num_tokens), row_bytes) &&
      FitsAdder(shape, row_bytes);
  const uint64_t piece_bytes = is_tagged                        ? kTaggedPieceBytes
                               : call.num_tokens >= kManyTokens ? 4096
                                                                : 2048;
  const auto num_tokens = static_cast<uint32_t>(call.num_tokens);
  const bool is_start = part == CallPart::kStart;
  const bool has_rows = is_start ? call.y != nullptr : call.out != nullptr;
  SlotCombineParams params{
      .device = rank.device,
      .area = rank.device.layout.ll_combine,
      .kind = SetKind::kLlCombine,
      .part = part,
      .is_tagged = is_tagged,
      .layout = call.layout,
      .operation = part == CallPart::kWhole ? Operation::kLlCombine
                   : is_start               ? Operation::kLlCombineStart
                                            : Operation::kLlCombineDone,
      .start_operation =
          part == CallPart::kWhole ? Operation::kLlCombine : Operation::kLlCombineStart,
      .num_send_blocks = 0,
      .num_tokens = num_tokens,
      .round = round,
      .rank_rows = std::max(shape.num_ranks * round.call_tokens, 1u),
      .pieces = has_rows ? CutRow(shape, row_bytes, piece_bytes, word_bytes) : Pieces{1, 0},
      .row_words = static_cast<uint32_t>(row_bytes / word_bytes),
      .row_bytes = row_bytes,
      .recv_rows = static_cast<uint64_t>(call.recv_rows),
      .recv_src = call.recv_src.data(),
      .send_slot = call.send_slot.data(),
      .epoch_in = epoch_in,
      .epoch_out = epoch_out};
  if (part != CallPart::kDone) {
    params.y = call.y;
    params.row_weights = DataOrNull(call.row_weights);
    params.pair_scalars = DataOrNull(call.pair_scalars);
  }
  if (!is_start) {
    params.out = has_rows ? call.out : nullptr;
    params.pair_scalars_out = DataOrNull(call.pair_scalars_out);
  }
  if (has_network && is_start) {
    const IndexPairsParams pairs{.device = rank.device,
                                 .operation = params.operation,
                                 .round = round,
                                 .num_tokens = num_tokens,
                                 .recv_src = params.recv_src,
                                 .recv_rows = params.recv_rows};
    if (const char* error = LaunchIndexPairs(rank, pairs, stream)) return error;
  }
  if (has_network && part == CallPart::kDone) {
    params.taken = {.operation = params.operation,
                    .start_operation = params.start_operation,
                    .kind = params.kind,
                    .num_tokens = num_tokens,
                    .num_pieces = params.pieces.count,
                    .has_rows = has_rows};
    if (const char* error =
            PrepareToTake(rank, epoch_in, params.taken, params.num_take_blocks, stream)) {
      return error;
    }
  }
#if JAX_EP_BULK_COPIES
  const bool moves_rows = (part == CallPart::kDone || params.y != nullptr) &&
                          (part == CallPart::kStart || params.out != nullptr);
  if (!has_network && is_vectorised && moves_rows) {
    const char* error = nullptr;
    if (LaunchLlCombine(rank, params, stream, &error)) return error;
  }
#endif
  const uint64_t num_owners = shape.num_ranks - (part == CallPart::kWhole ? 1 : 0);
  const uint64_t send_units = num_tokens * num_owners * params.pieces.count;
  const uint64_t add_units = static_cast<uint64_t>(num_tokens) * params.pieces.count;
  const uint32_t most = rank.ll_blocks;
  const auto blocks_for = [](uint64_t units, uint32_t limit) {
    return BlocksFor(units, kWarps, limit);
  };
  constexpr uint32_t kSendShare = 5;  // of 8 blocks
  constexpr uint32_t kShares = 8;
  const uint32_t most_senders = std::max(most * kSendShare / kShares, 1u);
  uint32_t blocks = 0;
  switch (part) {
    case CallPart::kWhole:
      params.num_send_blocks = blocks_for(send_units, most_senders);
      blocks = params.num_send_blocks + blocks_for(add_units, std::max(most - most_senders, 1u));
      break;
    case CallPart::kStart:
      params.num_send_blocks = blocks = blocks_for(send_units, most);
      break;
    case CallPart::kDone:
      blocks = params.num_take_blocks + blocks_for(add_units, most - params.num_take_blocks);
      break;
  }
  KernelOf(shape, is_vectorised)<<<blocks, kThreads, 0, stream>>>(params);
  return LaunchResult("SlotCombine");
}

}  // namespace jax_ep::gpu
