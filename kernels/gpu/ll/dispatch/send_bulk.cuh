// The senders of a whole LL dispatch with bulk copies. A block has
//   row warps     a token each, round after round: its row goes through shared memory to all
//                 destinations at once, while the next round's comes;
//   publishers    the flags of a round's rows, once all are stored (round_flags.cuh);
//   word warps    the rest: what is said before the rows.
// Few row warps, so that rows arrive one after the other and are placed meanwhile.
#pragma once

#include "kernels/gpu/device/round_flags.cuh"
#include "kernels/gpu/device/strides.h"
#include "kernels/gpu/ll/dispatch/destinations.cuh"
#include "kernels/gpu/ll/dispatch/source_words.cuh"

namespace jax_ep::gpu::ll {

inline constexpr uint32_t kSendSlots = 2;  // rows of a warp in shared memory

// Shared memory of such a block besides the rows.
struct BulkRows {
  uint64_t loaded[kWarps][kSendSlots];  // mbarriers
  RoundFlags<kWarps> flags;             // a warp hands over its row's destinations
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// What they share, whatever a row warp sends in a round: a row (RowSender), or a piece of one
// (send_records.cuh).
class BlockSender {
 protected:
  __device__ BlockSender(const LlDispatchKernelParams& params, BulkRows& shared)
      : params_(params),
        shared_(shared),
        num_warps_(params.num_bulk_warps),
        stride_(num_warps_ * params.num_send_blocks) {}

  // What a warp sends in a round, by its number among all that is sent. The first warp has
  // something in every round.
  __device__ uint32_t ItemOf(uint32_t round, uint32_t warp) const {
    return round * stride_ + warp * params_.num_send_blocks + blockIdx.x;
  }
  __device__ uint32_t NumRounds(uint32_t num_items) const {
    return CountStrided(blockIdx.x, stride_, num_items);
  }
  __device__ std::byte* SlotAt(uint32_t slot) const {
    return reinterpret_cast<std::byte*>(shared_ints) +
           (WarpId() * kSendSlots + slot) * params_.slot_bytes;
  }
  // One warp. The other ranks that a token goes to.
  __device__ uint64_t Others(const Destinations& dests) const {
    return dests.Mask() & ~(uint64_t{1} << params_.device.rank);
  }
  // Where the row of a token is in the heap of each of its destinations.
  __device__ uint64_t PlaceOf(const CallSlot& slot, uint32_t token) const {
    const DeviceRank& device = params_.device;
    return PushedRow(device.layout.ll_dispatch, slot.set, device.rank, token);
  }
  // function(rank) for the others of a mask.
  template <typename Function>
  __device__ void ForOthers(uint64_t dests, uint32_t token, Function&& function) const {
    const uint32_t num_ranks = params_.device.shape.num_ranks;
    for (uint32_t step = 0; step < num_ranks - 1; ++step) {
      // Tokens begin with different destinations, so that links are used alike.
      const uint32_t dest =
          (params_.device.rank + 1 + (step + token) % (num_ranks - 1)) % num_ranks;
      if ((dests >> dest & 1) != 0) function(dest);
    }
  }

  // All threads of the block: the row warps call send_rows(), a publisher set_flags(round, dests).
  template <typename SendRowsOf, typename SetFlagsOf>
  __device__ void SendBeside(const CallSlot& slot, uint32_t num_rounds, SendRowsOf&& send_rows,
                             SetFlagsOf&& set_flags) {
    if (WarpId() < num_warps_) {
      send_rows();
    } else if (WarpId() < num_warps_ + kFlagPublishers) {
      shared_.flags.Publish(WarpId() - num_warps_, num_rounds, set_flags);
    } else {
      const uint32_t others = num_warps_ + kFlagPublishers;
      const uint32_t word_warps = kWarps - others;
      const uint32_t first = (WarpId() - others) * params_.num_send_blocks + blockIdx.x;
      for (uint32_t item = first; item < NumWordItems(params_);
           item += word_warps * params_.num_send_blocks) {
        SendWords(params_, slot, item);
      }
    }
  }
  __device__ void SetFlag(const CallSlot& slot, uint32_t dest, uint32_t token,
                          uint32_t piece) const {
    const DeviceRank& device = params_.device;
    const uint64_t flag = PieceFlag(device.layout.ll_dispatch, slot.set, device.rank, token, piece);
    StoreRelaxedSys(HeapAt<uint64_t>(device, dest, flag), StartFlag(slot, params_.operation));
  }

  const LlDispatchKernelParams& params_;
  BulkRows& shared_;
  uint32_t num_warps_;
  uint32_t stride_;  // items of a round
};

class RowSender : private BlockSender {
 public:
  // is_sender: the block will send, else nothing is asked of this.
  __device__ RowSender(const LlDispatchKernelParams& params, BulkRows& shared, bool is_sender)
      : BlockSender(params, shared),
        num_tokens_(params.has_rows ? params.plan.num_tokens : 0),
        first_dests_(params, is_sender && WarpId() < num_warps_ ? TokenOf(0) : ~0u) {}

  // All threads of the block, before a SyncBlock. The first rows are on their way before it is
  // known where they go.
  __device__ void Begin() {
    if (LaneId() != 0 || WarpId() >= num_warps_) return;
    for (uint32_t slot = 0; slot < kSendSlots; ++slot) {
      BarrierInit(&shared_.loaded[WarpId()][slot], 1);
    }
    if (WarpId() == 0) shared_.flags.Init(num_warps_);
    FenceBarrierInit();
    for (uint32_t round = 0; round < kSendSlots; ++round) LoadRow(round, round);
  }

  // All threads of the block, after it.
  __device__ void Send(const CallSlot& slot) {
    SendBeside(
        slot, NumRounds(num_tokens_), [&] { SendRows(slot); },
        [&](uint32_t round, const uint64_t* dests) { SetFlags(slot, round, dests); });
  }

  // All threads of the block, instead of Send: a block must not end with copies on their way to it.
  __device__ void GiveUp() {
    if (LaneId() != 0 || WarpId() >= num_warps_) return;
    for (uint32_t round = 0; round < kSendSlots; ++round) {
      if (TokenOf(round) < num_tokens_) BarrierWait(&shared_.loaded[WarpId()][round], 0);
    }
  }

 private:
  __device__ uint32_t TokenOf(uint32_t round) const { return ItemOf(round, WarpId()); }
  // One lane.
  __device__ void LoadRow(uint32_t round, uint32_t slot) const {
    const uint32_t token = TokenOf(round);
    if (token >= num_tokens_) return;
    const auto row_bytes = static_cast<uint32_t>(params_.row_bytes);
    uint64_t* barrier = &shared_.loaded[WarpId()][slot];
    BarrierExpectBytes(barrier, row_bytes);
    BulkLoad(SlotAt(slot), params_.x + token * params_.x_bytes, row_bytes, barrier);
  }
  __device__ void SendRows(const CallSlot& slot) const {
    if (LaneId() == 0) FenceProxyAsync();  // the wait for the set's readers, before bulk stores
    RingPosition at, handed;
    uint64_t dests = Others(first_dests_);
    for (uint32_t round = 0; round < NumRounds(num_tokens_); ++round, at.Advance(kSendSlots)) {
      if (LaneId() == 0 && TokenOf(round) < num_tokens_) {
        BarrierWait(&shared_.loaded[WarpId()][at.slot], at.parity);
        StoreRow(slot, TokenOf(round), dests, SlotAt(at.slot));
      }
      const uint64_t next_dests = Others(Destinations(params_, TokenOf(round + 1)));
      if (LaneId() == 0) {
        BulkWaitAll();  // what this thread's copies have written is as if it had stored it
        LoadRow(round + kSendSlots, at.slot);
        shared_.flags.HandOver(handed, dests);
      }
      dests = next_dests;
    }
  }
  // One lane.
  __device__ void StoreRow(const CallSlot& slot, uint32_t token, uint64_t dests,
                           const std::byte* row) const {
    const uint64_t place = PlaceOf(slot, token);
    ForOthers(dests, token, [&](uint32_t dest) {
      BulkStore(HeapAt<std::byte>(params_.device, dest, place), row,
                static_cast<uint32_t>(params_.wire_bytes));
    });
    BulkCommit();
  }

  // One warp, after a fence.
  __device__ void SetFlags(const CallSlot& slot, uint32_t round, const uint64_t* dests) const {
    const uint32_t num_ranks = params_.device.shape.num_ranks;
    const uint32_t pieces = params_.pieces.count;
    for (uint32_t i = LaneId(); i < num_warps_ * num_ranks * pieces; i += kWarpSize) {
      const uint32_t warp = i / (num_ranks * pieces);
      const uint32_t dest = i / pieces % num_ranks;
      if ((dests[warp] >> dest & 1) == 0) continue;
      SetFlag(slot, dest, ItemOf(round, warp), i % pieces);
    }
  }

  uint32_t num_tokens_;  // whose rows are sent
  Destinations first_dests_;
};
#endif

}  // namespace jax_ep::gpu::ll
