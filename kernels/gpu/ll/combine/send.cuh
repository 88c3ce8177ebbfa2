// The senders of an LL combine with bulk copies. A block has
//   row warps     a piece of an item each, round after round: rows come into shared memory, and
//                 their sum goes to the owner while the next round's rows come;
//   publishers    the flags of a round's pieces, once all are stored (round_flags.cuh).
#pragma once

#include "kernels/gpu/ll/combine/sum_buffer.cuh"

namespace jax_ep::gpu::slot_combine {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <typename T, bool kIsTagged>
class LlCombineSender {
 public:
  __device__ LlCombineSender(const LlCombineParams& params, const ItemPartition& partition,
                             const PairTable& table, const CallSlot& slot,
                             RoundFlags<kWarps>& flags)
      : params_(params),
        call_(params.call),
        partition_(partition),
        table_(table),
        slot_(slot),
        flags_(flags),
        num_units_(partition.CountOf(NumItems(call_)) * call_.pieces.count),
        num_rounds_((num_units_ + params.num_send_warps - 1) / params.num_send_warps) {}

  __device__ static uint32_t NumItems(const SlotCombineParams& call) {
    return call.num_tokens * NumOwners(call);
  }
  // Of a token of an owner; tokens first.
  __device__ static uint32_t ItemOf(const SlotCombineParams& call, uint32_t owner, uint32_t token) {
    const uint32_t first = FirstOwner(call);
    const uint32_t num_ranks = call.device.shape.num_ranks;
    return token * NumOwners(call) + (owner >= first ? owner : owner + num_ranks) - first;
  }

  // All threads of the block. state: of the warp.
  __device__ void Run(SumBufferState& state) {
    const uint32_t warp = WarpId();
    if (warp < params_.num_send_warps) {
      SendPieces(state);
    } else if (!kIsTagged && warp < params_.num_send_warps + kFlagPublishers) {
      flags_.Publish(warp - params_.num_send_warps, num_rounds_,
                     [&](uint32_t round, const uint64_t* is_sent) { SetFlags(round, is_sent); });
    } else if (blockIdx.x == 0 && warp == kWarps - 1) {
      SayBegun();
    }
  }

 private:
  // In turn from there: this rank last, if it pushes to itself.
  __device__ static uint32_t FirstOwner(const SlotCombineParams& call) {
    return call.device.rank + 1;
  }
  // One warp. It publishes nothing: what is sent has flags of its own, or none.
  __device__ void SayBegun() const {
    const DeviceRank& device = call_.device;
    for (uint32_t peer = LaneId(); peer < device.shape.num_ranks; peer += kWarpSize) {
      if (peer == device.rank) continue;
      StoreRelaxedSys(HeapAt<uint64_t>(device, peer, call_.area.meta_flags.At(slot_.set)) +
                          SenderTo(device, peer),
                      StartFlag(slot_, call_.operation));
    }
  }
  // A piece of an item.
  struct Unit {
    uint32_t number;  // of the item, in the block
    uint32_t owner;
    uint32_t token;
    uint32_t piece;
  };

  __device__ Unit UnitOf(uint32_t round, uint32_t warp) const {
    const uint32_t unit = round * params_.num_send_warps + warp;
    const uint32_t num_ranks = call_.device.shape.num_ranks;
    const uint32_t number = params_.by_pieces.Quotient(unit);
    const uint32_t item = partition_.ItemAt(number);
    const uint32_t owner = FirstOwner(call_) + params_.by_owners.Remainder(item);
    return {.number = number,
            .owner = owner < num_ranks ? owner : owner - num_ranks,
            .token = params_.by_owners.Quotient(item),
            .piece = params_.by_pieces.Remainder(unit)};
  }
  __device__ WordRange RangeOf(const Unit& unit) const {
    return WordsOf(call_.pieces, unit.piece, call_.row_words);
  }

  __device__ void SendPieces(SumBufferState& state) {
    SumBuffer<T> buffer(params_, WarpId(), params_.send_buffer_bytes, state);
    if (LaneId() == 0) FenceProxyAsync();  // the wait for the set's readers, before bulk stores
    RingPosition handed;
    Begin(0, buffer);
    for (uint32_t round = 0; round < num_rounds_; ++round) {
      const bool is_sent = buffer.rows().count > 0;
      buffer.Finish();
      if (is_sent && kIsTagged) {
        StoreInWords(UnitOf(round, WarpId()), buffer);
      } else if (is_sent) {
        Store(UnitOf(round, WarpId()), buffer);
      }
      Begin(round + 1, buffer);
      if (LaneId() == 0 && !kIsTagged) {
        BulkWaitAll();  // what this thread's copies have written is as if it had stored it
        flags_.HandOver(handed, is_sent ? 1 : 0);
      }
      SyncWarp();  // the buffer's sum can be written again
    }
  }
  __device__ void Begin(uint32_t round, SumBuffer<T>& buffer) const {
    const bool is_unit = round * params_.num_send_warps + WarpId() < num_units_;
    const Unit unit = UnitOf(round, WarpId());
    const uint32_t top_k = call_.device.shape.top_k;
    buffer.Begin(is_unit ? RowsOf(table_, unit.number, top_k) : ItemRows(), RangeOf(unit));
  }
  // One warp: sends what is in the buffer, in tagged words.
  __device__ void StoreInWords(const Unit& unit, const SumBuffer<T>& buffer) const {
    const DeviceRank& device = call_.device;
    const TaggedPiece sent(call_.pieces, unit.piece, call_.row_words,
                           sizeof(typename T::PartialWord));
    const uint64_t row =
        TaggedRow(device.layout.ll_combine_tagged, slot_.set, device.rank, unit.token);
    SyncWarp();  // the sum is read by other lanes than have written it
    SendTagged(buffer.sum(), sent.num_bytes(), slot_.started,
               HeapAt<uint4>(device, unit.owner, row) + sent.first_word);
  }
  // One warp: sends what is in the buffer.
  __device__ void Store(const Unit& unit, const SumBuffer<T>& buffer) const {
    const DeviceRank& device = call_.device;
    const PushArea& area = call_.area;
    auto* block = HeapAt<std::byte>(device, unit.owner, area.blocks.At(slot_.set, device.rank));
    if (unit.piece == 0 && call_.pair_scalars != nullptr) {
      const uint32_t top_k = device.shape.top_k;
      auto* scalars = reinterpret_cast<float*>(block) + static_cast<uint64_t>(unit.token) * top_k;
      const float scalar = buffer.rows().PairScalar(call_, 0);
      if (LaneId() < top_k) scalars[LaneId()] = scalar;
    }
    FenceProxyAsyncShared();
    SyncWarp();
    if (LaneId() != 0) return;
    const WordRange range = RangeOf(unit);
    constexpr uint32_t kBytes = sizeof(typename T::PartialWord);
    BulkStore(
        block + area.rows + unit.token * area.pitch + static_cast<uint64_t>(range.begin) * kBytes,
        buffer.sum(), (range.end - range.begin) * kBytes);
    BulkCommit();
  }

  // One warp, after a fence.
  __device__ void SetFlags(uint32_t round, const uint64_t* is_sent) const {
    const DeviceRank& device = call_.device;
    for (uint32_t warp = LaneId(); warp < params_.num_send_warps; warp += kWarpSize) {
      if (is_sent[warp] == 0) continue;
      const Unit unit = UnitOf(round, warp);
      StoreRelaxedSys(
          HeapAt<uint64_t>(device, unit.owner,
                           PieceFlag(call_.area, slot_.set, device.rank, unit.token, unit.piece)),
          StartFlag(slot_, call_.operation));
    }
  }

  const LlCombineParams& params_;
  const SlotCombineParams& call_;
  const ItemPartition& partition_;
  const PairTable& table_;
  const CallSlot& slot_;
  RoundFlags<kWarps>& flags_;
  uint32_t num_units_;
  uint32_t num_rounds_;
};
#endif

}  // namespace jax_ep::gpu::slot_combine
