// The senders of an LL dispatch whose rows travel quantised, with bulk copies: as send_bulk.cuh has
// them, but a row warp quantises a piece of a row from the caller's array into shared memory, while
// its piece before is on its way. One warp alone would take microseconds for a row.
#pragma once

#include "kernels/gpu/device/element_units.cuh"
#include "kernels/gpu/ll/dispatch/send_bulk.cuh"

namespace jax_ep::gpu::ll {

// Of shared memory, for a piece: values, then scales.
inline uint64_t PieceSlotBytes(const Pieces& pieces, const RecordFormat& format) {
  const uint64_t num_blocks = pieces.num_words >> format.block_shift;
  return pieces.num_words * kUnitElems + AlignUp(num_blocks * format.scale_bytes(), sizeof(uint4));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <typename Elem>
class RecordSender : private BlockSender {
 public:
  // is_sender: as of RowSender.
  __device__ RecordSender(const LlDispatchKernelParams& params, BulkRows& shared, bool is_sender)
      : BlockSender(params, shared),
        num_items_(params.has_rows ? params.plan.num_tokens * params.pieces.count : 0),
        first_dests_(params, is_sender && WarpId() < num_warps_ ? TokenOf(0) : ~0u) {}

  // All threads of the block, before a SyncBlock.
  __device__ void Begin() {
    if (threadIdx.x != 0) return;
    shared_.flags.Init(num_warps_);
    FenceBarrierInit();
  }
  // All threads of the block, after it.
  __device__ void Send(const CallSlot& slot) {
    SendBeside(
        slot, NumRounds(num_items_), [&] { SendPieces(slot); },
        [&](uint32_t round, const uint64_t* dests) { SetFlags(slot, round, dests); });
  }
  __device__ void GiveUp() {}

 private:
  __device__ uint32_t TokenOf(uint32_t round) const {
    return ItemOf(round, WarpId()) / params_.pieces.count;
  }
  __device__ bool HasPiece(uint32_t round) const { return ItemOf(round, WarpId()) < num_items_; }
  __device__ WordRange RangeOf(uint32_t round) const {
    return WordsOf(params_.pieces, ItemOf(round, WarpId()) % params_.pieces.count,
                   params_.row_words);
  }
  __device__ std::byte* ScalesAt(uint32_t slot) const {
    return SlotAt(slot) + params_.pieces.num_words * kUnitElems;
  }

  // One warp. Starts to load.
  __device__ void Load(uint32_t round, ElementUnits<Elem>& units) const {
    if (!HasPiece(round)) return;
    const WordRange range = RangeOf(round);
    units.SetRow(params_.x + TokenOf(round) * params_.x_bytes);
    units.Load(range.begin + LaneId(), range.end);
  }
  // One warp: what is being loaded, into shared memory. Starts to load what comes next.
  __device__ void Quantize(uint32_t round, ElementUnits<Elem>& units) const {
    if (HasPiece(round)) {
      const WordRange range = RangeOf(round);
      std::byte* values = SlotAt(round % kSendSlots);
      std::byte* scales = ScalesAt(round % kSendSlots);
      GiveLoaded(units, range.begin, range.end,
                 [&](uint32_t unit, uint32_t end, const Unit& in_hand) {
                   if (unit >= end) return;
                   StoreUnit(params_.format, values, scales, unit - range.begin, in_hand);
                 });
      FenceProxyAsyncShared();  // each lane's stores, before bulk stores read them
    }
    SyncWarp();
    Load(round + 1, units);
  }
  // One warp: a piece to where it belongs in the records at its destinations.
  __device__ void Store(const CallSlot& slot, uint32_t round, uint64_t dests) const {
    const RecordFormat& format = params_.format;
    const WordRange range = RangeOf(round);
    const uint64_t place = PlaceOf(slot, TokenOf(round));
    const uint32_t first_block = range.begin >> format.block_shift;
    const uint32_t num_blocks = (range.end - range.begin) >> format.block_shift;
    const std::byte* scales = ScalesAt(round % kSendSlots);
    ForOthers(dests, TokenOf(round), [&](uint32_t dest) {
      auto* record = HeapAt<std::byte>(params_.device, dest, place);
      if (LaneId() == 0 && num_blocks > 0) {
        BulkStore(record + range.begin * kUnitElems, SlotAt(round % kSendSlots),
                  (range.end - range.begin) * kUnitElems);
      }
      for (uint32_t block = LaneId(); block < num_blocks; block += kWarpSize) {
        StoreScale(format, record + format.hidden(), first_block + block,
                   LoadScale(format, scales, block));
      }
    });
    if (LaneId() == 0) BulkCommit();
  }

  // One warp.
  __device__ void SendPieces(const CallSlot& slot) const {
    ElementUnits<Elem> units(params_.format);
    Load(0, units);
    if (LaneId() == 0) FenceProxyAsync();  // the wait for the set's readers, before bulk stores
    RingPosition handed;
    uint64_t dests = Others(first_dests_), sent = 0;
    const uint32_t num_rounds = NumRounds(num_items_);
    for (uint32_t round = 0; round < num_rounds; ++round) {
      const Destinations next(params_, TokenOf(round + 1));
      Quantize(round, units);  // where the piece of two rounds before has left
      if (round > 0) Finish(handed, sent);
      if (HasPiece(round)) Store(slot, round, dests);
      sent = dests;
      dests = Others(next);
    }
    if (num_rounds > 0) Finish(handed, sent);
  }
  // One warp: the piece that was stored last has arrived.
  __device__ void Finish(RingPosition& handed, uint64_t dests) const {
    SyncWarp();  // the lanes' scales, before lane 0 says so
    if (LaneId() == 0) {
      BulkWaitAll();  // what this thread's copies have written is as if it had stored it
      shared_.flags.HandOver(handed, dests);
    }
    SyncWarp();
  }

  // One warp, after a fence.
  __device__ void SetFlags(const CallSlot& slot, uint32_t round, const uint64_t* dests) const {
    const uint32_t num_ranks = params_.device.shape.num_ranks;
    for (uint32_t i = LaneId(); i < num_warps_ * num_ranks; i += kWarpSize) {
      const uint32_t warp = i / num_ranks;
      const uint32_t dest = i % num_ranks;
      if ((dests[warp] >> dest & 1) == 0) continue;
      const uint32_t item = ItemOf(round, warp);
      SetFlag(slot, dest, item / params_.pieces.count, item % params_.pieces.count);
    }
  }

  uint32_t num_items_;  // pieces that are sent
  Destinations first_dests_;
};
#endif

}  // namespace jax_ep::gpu::ll
