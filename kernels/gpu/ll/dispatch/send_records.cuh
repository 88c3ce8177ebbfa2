// The senders of an LL dispatch whose rows travel quantised, with bulk copies: as send_bulk.cuh has
// them, but the row warps quantise from the caller's array into shared memory. A row is quantised
// while the one before is on its way.
#pragma once

#include "kernels/gpu/device/record_units.cuh"
#include "kernels/gpu/ll/dispatch/send_bulk.cuh"

namespace jax_ep::gpu::ll {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <typename Elem>
class RecordSender : private RowSender {
 public:
  using RowSender::RowSender;

  // All threads of the block, before a SyncBlock.
  __device__ void Begin() {
    if (threadIdx.x != 0) return;
    shared_.flags.Init(num_warps_);
    FenceBarrierInit();
  }
  // All threads of the block, after it.
  __device__ void Send(const CallSlot& slot) {
    SendBeside(slot, [&] { SendRecords(slot); });
  }
  __device__ void GiveUp() {}

 private:
  // One warp.
  __device__ void Quantize(uint32_t round, uint32_t slot) const {
    const uint32_t token = TokenOf(round);
    if (token >= num_tokens_) return;
    std::byte* record = RowAt(slot);
    ForUnits(ElementUnits<Elem>(params_.format, params_.x + token * params_.x_bytes), 0,
             params_.format.num_units, [&](uint32_t unit, const Unit& in_hand) {
               StoreInRecord(params_.format, record, unit, in_hand);
             });
    FenceProxyAsyncShared();  // each lane's stores, before bulk stores read them
    SyncWarp();
  }

  __device__ void SendRecords(const CallSlot& slot) const {
    if (LaneId() == 0) FenceProxyAsync();  // the wait for the set's readers, before bulk stores
    RingPosition handed;
    uint64_t dests = Others(first_dests_);
    Quantize(0, 0);
    for (uint32_t round = 0; round < NumRounds(); ++round) {
      const uint32_t at = round % kSendSlots;
      if (LaneId() == 0 && TokenOf(round) < num_tokens_) {
        StoreRow(slot, TokenOf(round), dests, RowAt(at));
      }
      const uint64_t next_dests = Others(Destinations(params_, TokenOf(round + 1)));
      // Into the place whose copies were waited for in the round before.
      Quantize(round + 1, (at + 1) % kSendSlots);
      if (LaneId() == 0) {
        BulkWaitAll();  // what this thread's copies have written is as if it had stored it
        shared_.flags.HandOver(handed, dests);
      }
      SyncWarp();
      dests = next_dests;
    }
  }
};
#endif

}  // namespace jax_ep::gpu::ll
