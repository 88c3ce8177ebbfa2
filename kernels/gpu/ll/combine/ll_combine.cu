// LL combines with bulk copies, on one node. What peers see is what slot_combine.cu does without
// them, so ranks and halves may differ in which of the two they run.
//
//   One kernel. The first blocks send, the others add; start has senders only, done has adders.
//   Both find their items' rows in recv_src themselves, which is on its way while the set is found.
//   Senders wait for nobody but for the readers of an older use of the set (slot_sets.cuh); adders
//   come later in the grid.
#include <algorithm>

#include "kernels/gpu/launch.h"
#include "kernels/gpu/ll/combine/add.cuh"
#include "kernels/gpu/ll/combine/scan.cuh"
#include "kernels/gpu/ll/combine/send.cuh"

namespace jax_ep::gpu {
#if JAX_EP_BULK_COPIES
namespace {

using namespace slot_combine;

template <typename T, bool kIsTagged>
__global__ void __launch_bounds__(kThreads, 1)
    LlCombine(const __grid_constant__ LlCombineParams params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ BlockCall block_call;
  __shared__ uint32_t shared_flag;
  __shared__ SumBufferState buffers[kWarps];
  __shared__ uint64_t scanned[kWarps];  // mbarriers
  __shared__ RoundFlags<kWarps> flags;
  const SlotCombineParams& call = params.call;
  const DeviceRank& device = call.device;
  if (LaneId() == 0) {
    BarrierInit(&scanned[WarpId()], 1);
    BarrierInit(&buffers[WarpId()].loaded, 1);
    if (WarpId() == 0) flags.Init(params.num_send_warps);
    FenceBarrierInit();
  }
  SrcScan scan(params, &scanned[WarpId()]);
  const uint64_t sequence = SequenceOf(device);
  const OpenEnd end(device);
  const uint32_t num_senders = call.num_send_blocks;
  const bool is_sender = blockIdx.x < num_senders;
  const ItemPartition partition =
      is_sender
          ? ItemPartition{params.by_send_blocks, num_senders, blockIdx.x}
          : ItemPartition{params.by_add_blocks, gridDim.x - num_senders, blockIdx.x - num_senders};
  using Sender = LlCombineSender<T, kIsTagged>;
  const PairTable table(device.shape.top_k,
                        partition.CountOf(is_sender ? Sender::NumItems(call) : call.num_tokens));
  table.Clear();
  BeginCall(device, call.kind, call.part, call.operation, call.epoch_in, is_sender, block_call);
  const CallSlot& slot = block_call.slot;
  scan.Run([&](int32_t src, uint32_t row) {
    // Without branches, as lanes have several of these at a time.
    const auto code = static_cast<uint32_t>(src);
    const uint32_t source = params.by_source_codes.Quotient(code);
    const uint32_t pair = params.by_source_codes.Remainder(code);
    const uint32_t token = params.by_top_k.Quotient(pair);
    const uint32_t item = is_sender ? Sender::ItemOf(call, source, token) : token;
    const bool is_sent = source != device.rank || call.part == CallPart::kStart;
    // Plans come from the caller: what no plan says is ignored.
    const bool is_planned =
        (src >= 0) & (source < device.shape.num_ranks) & (token < call.num_tokens);
    if (is_planned & (is_sent == is_sender) & partition.IsMine(item)) {
      table.Put(partition.NumberOf(item), params.by_top_k.Remainder(pair),
                static_cast<int32_t>(row));
    }
  });
  SyncBlock();
  if (slot.is_ok != 0) {
    if (!is_sender) {
      LlCombineAdder<T, kIsTagged>(params, partition, table, slot).Run(buffers[WarpId()]);
    } else if (WaitReusable(device, call.kind, call.operation, block_call, &shared_flag)) {
      Sender(params, partition, table, slot, flags).Run(buffers[WarpId()]);
    }
  }
  FinishSlotCombine<false>(call, sequence, slot, end, &shared_flag);
#endif
}

using Kernel = void (*)(LlCombineParams);

// Two kernels, since one of both is slower than either.
template <typename T>
Kernel KernelOf(bool is_tagged) {
  return is_tagged ? &LlCombine<T, true> : &LlCombine<T, false>;
}
Kernel KernelOf(const GroupShape& shape, bool is_tagged) {
  return WithSumTypes(shape, [&]<typename Elem, typename Partial>() -> Kernel {
    static_assert(kMaxNodeRanks <= 1u << 6);
    if (shape.num_ranks <= 1u << 2) return KernelOf<SumTypes<Elem, Partial, true, 2>>(is_tagged);
    static_assert(kMostTaggedPartials <= 1u << 3);
    if (shape.num_ranks <= 1u << 3) return KernelOf<SumTypes<Elem, Partial, true, 3>>(is_tagged);
    return &LlCombine<SumTypes<Elem, Partial, true, 6>, false>;
  });
}

uint32_t MostSharedBytes(const RankHandle& rank) {
  constexpr uint32_t kRest = 256;
  return rank.shared_bytes_per_block -
         static_cast<uint32_t>(kWarps * (sizeof(SumBufferState) + sizeof(uint64_t)) +
                               sizeof(RoundFlags<kWarps>)) -
         kRest;
}

constexpr uint32_t kMostTableBytes = 32u << 10;
constexpr uint32_t kAlign = 128;  // of buffers

// Blocks, and what their warps have of shared memory. False: it does not suffice.
bool Divide(const RankHandle& rank, LlCombineParams& params, uint32_t* num_blocks) {
  SlotCombineParams& call = params.call;
  const GroupShape& shape = rank.device.shape;
  const uint32_t num_items = call.num_tokens * NumOwners(call);
  uint32_t most_senders = rank.ll_blocks;
  uint32_t most_adders = rank.ll_blocks;
  if (call.part == CallPart::kWhole) {
    most_senders = std::max(rank.ll_blocks / 2, 1u);
    most_adders = std::max(rank.ll_blocks - most_senders, 1u);
  }
  // Also without tokens: peers are told that the call has begun.
  const bool has_senders = call.part != CallPart::kDone && NumOwners(call) > 0;
  const bool has_adders = call.part != CallPart::kStart;
  call.num_send_blocks = has_senders ? std::clamp(num_items, 1u, most_senders) : 0;
  const uint32_t num_adders = has_adders ? std::clamp(call.num_tokens, 1u, most_adders) : 0;
  *num_blocks = call.num_send_blocks + num_adders;
  const uint64_t items = std::max(DivideUp(num_items, std::max(call.num_send_blocks, 1u)),
                                  DivideUp(call.num_tokens, std::max(num_adders, 1u)));
  const uint64_t table_bytes = AlignUp(items * shape.top_k * sizeof(int32_t), kAlign);
  if (table_bytes > kMostTableBytes) return false;
  constexpr uint32_t kSendWarps = 12, kTaggedSendWarps = kWarps - 1;
  static_assert(kSendWarps + kFlagPublishers < kWarps);
  const uint64_t partial_bytes =
      shape.f32_partials ? sizeof(float) : static_cast<uint64_t>(ElemBytes(shape.elem_type));
  const uint64_t elems = call.pieces.num_words * sizeof(uint4) / ElemBytes(shape.elem_type);
  const uint32_t available = MostSharedBytes(rank) - static_cast<uint32_t>(table_bytes);
  params.by_source_codes = Divisor(static_cast<uint32_t>(shape.max_tokens * shape.top_k));
  params.by_top_k = Divisor(shape.top_k);
  params.by_pieces = Divisor(call.pieces.count);
  params.by_owners = Divisor(std::max(NumOwners(call), 1u));
  params.by_send_blocks = Divisor(std::max(call.num_send_blocks, 1u));
  params.by_add_blocks = Divisor(std::max(num_adders, 1u));
  params.by_rank_rows = Divisor(call.rank_rows);
  params.table_bytes = static_cast<uint32_t>(table_bytes);
  params.num_send_warps = call.is_tagged ? kTaggedSendWarps : kSendWarps;
  params.sum_bytes = static_cast<uint32_t>(AlignUp(elems * partial_bytes, kAlign));
  params.gather_bytes = call.is_tagged ? (shape.num_ranks - 1) * params.sum_bytes : 0;
  if (available / kWarps < params.gather_bytes) return false;
  params.send_buffer_bytes = available / params.num_send_warps / kAlign * kAlign;
  params.add_buffer_bytes = (available / kWarps - params.gather_bytes) / kAlign * kAlign;
  constexpr uint32_t kLeastRowBytes = 2048;
  return params.sum_bytes + kLeastRowBytes <= params.add_buffer_bytes;
}

}  // namespace

const char* PrepareLlCombineKernels(const RankHandle& rank) {
  for (const bool is_tagged : {false, true}) {
    const Kernel kernel = KernelOf(rank.device.shape, is_tagged);
    if (const char* error = PrepareKernel(kernel, MostSharedBytes(rank))) return error;
  }
  return nullptr;
}

bool LaunchLlCombine(const RankHandle& rank, const SlotCombineParams& call, cudaStream_t stream,
                     const char** error) {
  LlCombineParams params{.call = call};
  uint32_t blocks = 0;
  const bool is_possible =
      rank.use_bulk_copies && IsWordAligned(call.recv_src) && rank.device.shape.top_k <= kWarpSize;
  if (!is_possible || !Divide(rank, params, &blocks)) return false;
  const uint32_t shared_bytes =
      params.table_bytes + std::max(params.num_send_warps * params.send_buffer_bytes,
                                    kWarps * (params.add_buffer_bytes + params.gather_bytes));
  KernelOf(rank.device.shape, call.is_tagged)<<<blocks, kThreads, shared_bytes, stream>>>(params);
  *error = LaunchResult("LlCombine");
  return true;
}
#endif
}  // namespace jax_ep::gpu
