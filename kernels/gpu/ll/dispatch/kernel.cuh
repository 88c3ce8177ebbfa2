// The kernel of an LL dispatch (ll_dispatch.cu), by how its rows are handled: plain and weighted
// rows (copy_rows.cuh), or records (place_records.cuh).
#pragma once

#include "kernels/gpu/ll/dispatch/receive.cuh"
#include "kernels/gpu/ll/dispatch/send_bulk.cuh"
#include "kernels/gpu/network/take_records.cuh"
#include "kernels/gpu/protocol/open_end.cuh"

namespace jax_ep::gpu::ll {

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
  typename Rows::Sender bulk_sender(params, bulk_rows, sends_in_bulk);
  if (sends_in_bulk) bulk_sender.Begin();
#else
  constexpr bool sends_in_bulk = false;
#endif
  BeginCall(device, kKind, params.part, params.operation, params.epoch_in,
            blockIdx.x < params.num_send_blocks, call);
  const CallSlot& slot = call.slot;
  [[maybe_unused]] bool has_sent = false;  // read where there are bulk copies
  if (slot.is_ok != 0) {
    if (blockIdx.x >= params.num_send_blocks + params.num_take_blocks) {
      Receive<Rows>(params, slot, items);
    } else if (params.num_take_blocks > 0) {
      BlockTakeRecords(device, params.taken, slot, blockIdx.x, &shared_flag);
    } else if (WaitReusable(device, kKind, params.operation, call, &shared_flag)) {
      has_sent = true;
      if (!sends_in_bulk) Rows::Send(params, slot);
    }
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (sends_in_bulk) has_sent ? bulk_sender.Send(slot) : bulk_sender.GiveUp();
#endif
  const auto write = [&] {
    if (params.epoch_out != nullptr) *params.epoch_out = EpochOf(device, slot.started);
    const LlRound& round = params.round;
    const bool is_first = round.first_token == 0 && !round.is_plan_alone;
    if (params.part != CallPart::kStart && is_first) CountUp(&ControlOf(device)->dispatches, 1);
    UpdateSet(device, kKind, params.part, slot, sequence);
  };
  if (HasOpenEnd(device, params.part)) {
    return end.Finish(sequence, write, [&] { Poison(params); });
  }
  if (!LastToArrive(device, &shared_flag)) return;
  if (device.network != nullptr && params.part == CallPart::kDone &&
      !SyncBlockAny(threadIdx.x == 0 && HasFailed(device))) {
    NoteRead(device, kKind, params.operation, slot.set);
  }
  if (threadIdx.x == 0) {
    write();
    EndOperation(device, sequence);
  }
  if (HasFailed(device)) {
    if (params.part != CallPart::kStart) Poison(params);
  } else if (params.part == CallPart::kDone) {
    SignalConsumed(device, kKind, sequence);
  }
}

using Kernel = void (*)(LlDispatchKernelParams);
// Of rows that travel as records (ll_dispatch_records.cu).
Kernel RecordKernelOf(ElemType type, bool are_split);

}  // namespace jax_ep::gpu::ll
