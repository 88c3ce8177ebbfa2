// LL dispatch: every rank pushes its rows into the slot [source][token] of each destination's set,
// once per destination rank; the destination packs them to the layout. With routing aboard each
// rank gets all expert ids and makes the plan from them, so there is no other exchange.
//
//   One kernel. The first blocks send: ids and weights to each peer, in tagged words, and pieces of
//   rows, each with a flag. The other blocks receive: they wait for the ids of all peers, make the
//   plan, and wait for the flag of each piece before they place it; the first of them only adds up
//   the plan's totals. Senders wait for nobody but for the readers of an older use of the set
//   (slot_sets.cuh); receivers come later in the grid.
//   start is a kernel of senders, done one of receivers. A whole call reads its own rows in place;
//   a start pushes them to its own set as well. Over several nodes a whole call is a start and a
//   done, and network/slots.cu sends and takes in what crosses nodes.
#include <algorithm>

#include "kernels/gpu/lanes/ll_send.cuh"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/ll/dispatch/copy_rows.cuh"
#include "kernels/gpu/ll/dispatch/receive.cuh"
#include "kernels/gpu/ll/dispatch/send_bulk.cuh"
#include "kernels/gpu/network/launchers.h"
#include "kernels/gpu/protocol/open_end.cuh"

namespace jax_ep::gpu {
namespace {

using namespace ll;

template <typename Rows>
__global__ void __launch_bounds__(kThreads, 1)
    LlDispatch(const __grid_constant__ LlDispatchKernelParams params) {
  __shared__ BlockCall call;
  __shared__ uint32_t shared_flag;
  __shared__ PlacedRows items[kWarps];
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  const OpenEnd end(device);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ BulkRows bulk_rows;
  const bool sends_in_bulk = blockIdx.x < params.num_send_blocks && params.num_bulk_warps > 0;
  BulkSender bulk_sender(params, bulk_rows, sends_in_bulk);
  if (sends_in_bulk) bulk_sender.Begin();
#else
  constexpr bool sends_in_bulk = false;
#endif
  BeginCall(device, kKind, params.part, params.operation, params.epoch_in,
            blockIdx.x < params.num_send_blocks, call);
  const CallSlot& slot = call.slot;
  [[maybe_unused]] bool has_sent = false;  // read where there are bulk copies
  if (slot.is_ok != 0) {
    if (blockIdx.x >= params.num_send_blocks) {
      Receive<Rows>(params, slot, items);
    } else if (WaitReusable(device, kKind, params.operation, call, &shared_flag)) {
      has_sent = true;
      if (!sends_in_bulk) Send<typename Rows::Word>(params, slot);
    }
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (sends_in_bulk) has_sent ? bulk_sender.Send(slot) : bulk_sender.GiveUp();
#endif
  const auto end_operation = [&] {
    if (params.epoch_out != nullptr) *params.epoch_out = EpochOf(slot.started);
    if (params.part != CallPart::kStart) CountUp(&ControlOf(device)->dispatches, 1);
    UpdateSet(device, kKind, params.part, slot, sequence);
    EndOperation(device, sequence);
  };
  if (HasOpenEnd(device, params.part)) {
    // The last warp has neither rows to send nor, where there are many, to place.
    if (threadIdx.x == kThreads - 1 && end.IsLastReader()) end_operation();
    if (end.EndBlock()) Poison(params);
    return;
  }
  if (!LastToArrive(device, &shared_flag)) return;
  if (threadIdx.x == 0) end_operation();
  if (HasFailed(device)) {
    if (params.part != CallPart::kStart) Poison(params);
  } else if (params.part == CallPart::kDone) {
    SignalConsumed(device, kKind, sequence);
  }
}

using Kernel = void (*)(LlDispatchKernelParams);

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

// Rows, `most` at most, that a block has room for beside `other_bytes` in its shared memory.
uint32_t BulkRowsOf(const RankHandle& rank, uint64_t other_bytes, uint32_t most) {
  const GroupShape& shape = rank.device.shape;
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  if (!rank.use_bulk_copies || row_bytes % kWireUnitBytes != 0) return 0;
  const uint64_t available = MostSharedBytes(rank);
  if (available < other_bytes) return 0;
  return static_cast<uint32_t>(std::min<uint64_t>((available - other_bytes) / row_bytes, most));
}
constexpr uint32_t kMostSendWarps = 4;
uint32_t SendWarpsOf(const RankHandle& rank) {
  return BulkRowsOf(rank, 0, kMostSendWarps * kSendSlots) / kSendSlots;
}
constexpr uint32_t kMostPlaceWarps = 12;  // the others write what no row fills
uint32_t PlaceWarpsOf(const RankHandle& rank) {
  return BulkRowsOf(rank, PlanBytes(rank), kMostPlaceWarps);
}

uint32_t SharedBytes(const RankHandle& rank, uint32_t num_send_warps, uint32_t num_place_warps) {
  const GroupShape& shape = rank.device.shape;
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  return static_cast<uint32_t>(std::max(num_send_warps * kSendSlots * row_bytes,
                                        PlanBytes(rank) + num_place_warps * row_bytes));
}

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
  return nullptr;
}

const char* LaunchLlDispatch(RankHandle& rank, const PlanParams* plan, const DispatchParams& call,
                             CallPart part, const int32_t* epoch_in, int32_t* epoch_out,
                             cudaStream_t stream) {
  const GroupShape& shape = rank.device.shape;
  const bool has_network = shape.num_nodes() > 1;
  if (has_network && part == CallPart::kWhole) {
    int32_t* epoch = WholeEpochOf(rank);
    const char* error =
        LaunchLlDispatch(rank, plan, call, CallPart::kStart, nullptr, epoch, stream);
    if (error != nullptr) return error;
    return LaunchLlDispatch(rank, plan, call, CallPart::kDone, epoch, nullptr, stream);
  }
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  const bool is_vectorised = HasWholeWords(row_bytes, {call.x, call.recv_x, call.y});
  const uint64_t word_bytes = is_vectorised ? sizeof(uint4) : ElemBytes(shape.elem_type);
  constexpr uint64_t kPieceBytes = 4096;
  const Pieces pieces = CutRow(shape, row_bytes, kPieceBytes, word_bytes);

  LlDispatchKernelParams params{.device = rank.device,
                                .part = part,
                                .is_routed = plan != nullptr,
                                .zero_padding = call.zero_padding,
                                .pieces = pieces,
                                .row_words = static_cast<uint32_t>(row_bytes / word_bytes),
                                .row_bytes = row_bytes,
                                .x = call.x,
                                .weights = DataOrNull(call.weights),
                                .given_slots = call.send_slot.data(),
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
    planner.out = ArraysOf(plan->out);
  }

  if (has_network && is_start) {
    const SendRecordsParams records{
        .device = rank.device,
        .operation = params.operation,
        .is_routed = params.is_routed,
        .num_tokens = planner.num_tokens,
        .header = HeaderOf(params, params.operation, rank.device.program),
        .row_bytes = row_bytes,
        .x = params.has_rows ? params.x : nullptr,
        .ids = params.is_routed ? params.topk_idx : params.given_slots,
        .weights = params.has_weights ? params.weights : nullptr};
    if (const char* error = LaunchSendRecords(rank, records, stream)) return error;
  }
  if (has_network && part == CallPart::kDone) {
    const TakeRecordsParams records{.device = rank.device,
                                    .operation = params.operation,
                                    .start_operation = params.start_operation,
                                    .kind = kKind,
                                    .num_tokens = planner.num_tokens,
                                    .num_pieces = pieces.count,
                                    .has_rows = params.has_rows,
                                    .epoch = epoch_in};
    if (const char* error = LaunchTakeRecords(rank, records, stream)) return error;
  }
  const uint64_t num_dests = shape.num_ranks - (part == CallPart::kWhole ? 1 : 0);
  if (is_vectorised && part == CallPart::kWhole && num_dests > 0) {
    params.num_bulk_warps = SendWarpsOf(rank);
  }
  const bool is_weighted = params.row_weights != nullptr || params.recv_dots != nullptr;
  constexpr int64_t kFewestPlaced = 64;  // measured: lanes place fewer tokens as quickly
  if (is_vectorised && !is_start && call.recv_x != nullptr && !is_weighted &&
      call.num_tokens >= kFewestPlaced) {
    params.num_place_warps = PlaceWarpsOf(rank);
    params.place_offset = static_cast<uint32_t>(PlanBytes(rank));
  }
  const uint64_t word_items = NumWordItems(params);
  // Bulk senders take a token each.
  const uint64_t row_items = params.num_bulk_warps > 0 ? static_cast<uint64_t>(call.num_tokens) *
                                                             kWarps / params.num_bulk_warps
                                                       : call.num_tokens * pieces.count;
  const uint64_t send_items = word_items + (params.has_rows ? row_items : 0);
  const uint64_t receive_items =
      std::max<uint64_t>(call.num_tokens * shape.num_ranks * pieces.count,
                         static_cast<uint64_t>(planner.recv_rows) / kWarpSize);
  const auto blocks_for = [](uint64_t items, uint32_t most) {
    return BlocksFor(items, kWarps, most);
  };
  // Measured: bench_ll with 2 and 4 ranks on one H200.
  constexpr uint32_t kSendShare = 2;  // of 8 blocks
  constexpr uint32_t kShares = 8;
  const uint32_t most_senders = std::max(rank.ll_blocks * kSendShare / kShares, 1u);
  // Totals take long where there are many pairs, so a block has nothing else to do.
  constexpr uint32_t kFewestBlocks = 8;
  params.has_totals_block = !is_start && plan != nullptr && rank.ll_blocks >= kFewestBlocks;
  const uint32_t num_totals_blocks = params.has_totals_block ? 1 : 0;
  uint32_t blocks = 0;
  switch (part) {
    case CallPart::kWhole:
      params.num_send_blocks = num_dests == 0 ? 1 : blocks_for(send_items, most_senders);
      blocks = params.num_send_blocks + num_totals_blocks +
               blocks_for(receive_items,
                          std::max(rank.ll_blocks - most_senders, 1u + num_totals_blocks) -
                              num_totals_blocks);
      break;
    case CallPart::kStart:
      params.num_send_blocks = blocks = blocks_for(send_items, rank.ll_blocks);
      break;
    case CallPart::kDone:
      blocks = num_totals_blocks + blocks_for(receive_items, rank.ll_blocks - num_totals_blocks);
      break;
  }
  const uint32_t shared_bytes = SharedBytes(rank, params.num_bulk_warps, params.num_place_warps);
  KernelOf(shape.elem_type, is_vectorised,
           is_weighted)<<<blocks, kThreads, shared_bytes, stream>>>(params);
  return LaunchResult("LlDispatch");
}

}  // namespace jax_ep::gpu
