// The adders of an LL combine with bulk copies. A warp has a piece of a token at a time: in a whole
// call it sums this rank's own rows; it waits for the partials, and adds all along the tree.
#pragma once

#include "kernels/gpu/ll/combine/sum_buffer.cuh"

namespace jax_ep::gpu::slot_combine {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// The partials of a piece: those of a set, and that of one rank in a buffer.
template <typename T>
class PiecePartials {
 public:
  // Of a lane at once: what there are registers for.
  static constexpr uint32_t kWords =
      T::kLevels > 3 ? 1 : (T::kLevels > 2 || sizeof(typename T::PartialWord) > 16 ? 2 : 4);
  using Sums = float[kWords][T::kElems];

  // holders: [N] the ranks that have one; summed_here: the rank whose partial is in `buffer`.
  __device__ PiecePartials(const SlotCombineParams& call, uint32_t set, uint64_t token,
                           WordRange range, uint64_t holders, uint32_t summed_here,
                           const std::byte* buffer)
      : call_(call),
        set_(set),
        offset_(token * call.area.pitch + uint64_t{range.begin} * sizeof(PartialWord)),
        num_words_(range.end - range.begin),
        holders_(holders),
        summed_here_(summed_here),
        buffer_(buffer) {}

  // One warp: the sum over ranks, to `out`.
  __device__ void WriteSum(typename T::Word* out) const {
    for (uint32_t word = LaneId(); word < num_words_; word += kWords * kWarpSize) {
      Sums sums;
      Add<T::kLevels>(0, word, sums);
#pragma unroll
      for (uint32_t j = 0; j < kWords; ++j) {
        const uint32_t at = word + j * kWarpSize;
        if (at >= num_words_) continue;
        const auto sum = Pack<typename T::Elem, typename T::Word>(sums[j]);
        out[at] = holders_ == 0 ? typename T::Word{} : sum;
      }
    }
  }

 private:
  using PartialWord = typename T::PartialWord;

  // The sum over the ranks from `first` to first + 2^kLevel - 1, along the tree. Where a rank has
  // nothing it adds -0, which leaves every number as it is.
  template <uint32_t kLevel>
  __device__ void Add(uint32_t first, uint32_t word, Sums& sums) const {
    if constexpr (kLevel == 2) {
      AddFour(first, word, sums);
    } else {
      Add<kLevel - 1>(first, word, sums);
      const uint32_t second = first + (1u << (kLevel - 1));
      if (second >= call_.device.shape.num_ranks) return;
      Sums right;
      Add<kLevel - 1>(second, word, right);
#pragma unroll
      for (uint32_t j = 0; j < kWords; ++j) AddTo(sums[j], right[j]);
    }
  }
  // Loads of all four are on their way together.
  __device__ void AddFour(uint32_t first, uint32_t word, Sums& sums) const {
    constexpr uint32_t kRanks = 4;
    PartialWord loaded[kRanks][kWords];
#pragma unroll
    for (uint32_t i = 0; i < kRanks; ++i) Load(first + i, word, loaded[i]);
#pragma unroll
    for (uint32_t j = 0; j < kWords; ++j) {
      float values[kRanks][T::kElems];
#pragma unroll
      for (uint32_t i = 0; i < kRanks; ++i) Unpack<typename T::Partial>(loaded[i][j], values[i]);
      AddTo(values[0], values[1]);
      AddTo(values[2], values[3]);
      AddTo(values[0], values[2]);
#pragma unroll
      for (uint32_t e = 0; e < T::kElems; ++e) sums[j][e] = values[0][e];
    }
  }
  __device__ static void AddTo(float (&sum)[T::kElems], const float (&values)[T::kElems]) {
#pragma unroll
    for (uint32_t e = 0; e < T::kElems; ++e) sum[e] = jax_ep::gpu::Add(sum[e], values[e]);
  }
  __device__ void Load(uint32_t rank, uint32_t word, PartialWord (&words)[kWords]) const {
    const DeviceRank& device = call_.device;
    const bool is_here = (holders_ >> rank & 1) != 0;
    const std::byte* from = buffer_;
    if (is_here && rank != summed_here_) {
      from = OwnHeapAt<std::byte>(device, call_.area.blocks.At(set_, rank) + call_.area.rows) +
             offset_;
    }
#pragma unroll
    for (uint32_t j = 0; j < kWords; ++j) {
      // -0 in each element.
      constexpr uint32_t kBits =
          sizeof(typename T::Storage) == sizeof(float) ? 0x80000000u : 0x80008000u;
      uint32_t zeros[sizeof(PartialWord) / sizeof(uint32_t)];
#pragma unroll
      for (uint32_t& zero : zeros) zero = kBits;
      __builtin_memcpy(&words[j], zeros, sizeof(PartialWord));
      const uint32_t at = word + j * kWarpSize;
      if (is_here && at < num_words_) words[j] = reinterpret_cast<const PartialWord*>(from)[at];
    }
  }

  const SlotCombineParams& call_;
  uint32_t set_;
  uint64_t offset_;  // of the piece, among a block's rows
  uint32_t num_words_;
  uint64_t holders_;
  uint32_t summed_here_;
  const std::byte* buffer_;
};

template <typename T>
class LlCombineAdder {
 public:
  __device__ LlCombineAdder(const LlCombineParams& params, const ItemPartition& partition,
                            const PairTable& table, const CallSlot& slot)
      : params_(params),
        call_(params.call),
        partition_(partition),
        table_(table),
        slot_(slot),
        summed_here_(call_.part == CallPart::kWhole ? call_.device.rank : kNobody) {}

  // All threads of the block. state: of the warp.
  __device__ void Run(SumBufferState& state) {
    const DeviceRank& device = call_.device;
    const uint32_t top_k = device.shape.top_k;
    const uint32_t num_units = partition_.CountOf(call_.num_tokens) * call_.pieces.count;
    SumBuffer<T> buffer(params_, WarpId(), params_.add_buffer_bytes, state);
    for (uint32_t unit = WarpId(); unit < num_units; unit += kWarps) {
      const uint32_t number = params_.by_pieces.Quotient(unit);
      const uint32_t piece = params_.by_pieces.Remainder(unit);
      const uint64_t token = partition_.ItemAt(number);
      int32_t slot_of_pair = kNoRow;
      if (LaneId() < top_k) slot_of_pair = call_.send_slot[token * top_k + LaneId()];
      const WordRange range = WordsOf(call_.pieces, piece, call_.row_words);
      buffer.Begin(ItemRows(table_, number, top_k), range);
      const uint32_t holder = HolderOf(slot_of_pair);
      const uint64_t holders = HoldersOf(holder, buffer.rows().count > 0);
      buffer.Finish();
      SyncWarp();  // the sum is read by other lanes than have written it
      if (unit == WarpId() && !WaitBegun()) return;
      if (!WaitPieces(holders, token, piece)) return;
      if (piece == 0 && call_.pair_scalars_out != nullptr) {
        WriteScalar(token, holder, buffer.rows());
      }
      auto* out = reinterpret_cast<typename T::Word*>(call_.out + token * call_.row_bytes);
      PiecePartials<T>(call_, slot_.set, token, range, holders, summed_here_, buffer.sum())
          .WriteSum(out + range.begin);
      SyncWarp();  // the sum has been read
    }
  }

 private:
  static constexpr uint32_t kNobody = ~0u;

  // Plans come from the caller: a slot beyond the last rank is none.
  __device__ uint32_t HolderOf(int32_t slot_of_pair) const {
    if (slot_of_pair < 0) return kNobody;
    const uint32_t holder = params_.by_rank_rows.Quotient(static_cast<uint32_t>(slot_of_pair));
    return holder < call_.device.shape.num_ranks ? holder : kNobody;
  }
  // One warp. The rank whose partial is in the buffer by its rows, others by what the token's pairs
  // say.
  __device__ uint64_t HoldersOf(uint32_t holder, bool has_rows) const {
    uint64_t holders = has_rows ? uint64_t{1} << summed_here_ : 0;
    if (holder != kNobody && holder != summed_here_) holders |= uint64_t{1} << holder;
    return WarpOr(holders);
  }
  __device__ uint64_t Value() const { return StartFlag(slot_, call_.start_operation); }
  // One warp: until all peers are in this operation.
  __device__ bool WaitBegun() const {
    return WarpWaitFlags(call_.device, call_.area.meta_flags.At(slot_.set), 0,
                         call_.device.shape.num_ranks, call_.operation, Value());
  }
  // One warp: until the piece of all holders is here.
  __device__ bool WaitPieces(uint64_t holders, uint64_t token, uint32_t piece) const {
    const DeviceRank& device = call_.device;
    bool is_ok = true;
    for (uint32_t peer = LaneId(); peer < device.shape.num_ranks; peer += kWarpSize) {
      if ((holders >> peer & 1) == 0 || peer == summed_here_) continue;
      const uint64_t flag = PieceFlag(call_.area, slot_.set, peer, token, piece);
      is_ok &=
          WaitExactFlag(device, OwnHeapAt<uint64_t>(device, flag), peer, call_.operation, Value());
    }
    return AllHaveWaited(is_ok);
  }
  // One warp, where the token's first piece is.
  __device__ void WriteScalar(uint64_t token, uint32_t holder, const ItemRows& rows) const {
    const DeviceRank& device = call_.device;
    const uint32_t top_k = device.shape.top_k;
    const uint64_t cell = token * top_k + LaneId();
    float scalar = 0.0f;
    if (call_.pair_scalars != nullptr && rows.count > 0) {
      const float own = rows.PairScalar(call_);
      if (holder == summed_here_) scalar = own;
    }
    if (LaneId() >= top_k) return;
    if (holder != kNobody && holder != summed_here_) {
      scalar = OwnHeapAt<float>(device, call_.area.blocks.At(slot_.set, holder))[cell];
    }
    call_.pair_scalars_out[cell] = scalar;
  }

  const LlCombineParams& params_;
  const SlotCombineParams& call_;
  const ItemPartition& partition_;
  const PairTable& table_;
  const CallSlot& slot_;
  uint32_t summed_here_;  // whose partials are summed here: this rank's, or nobody's
};
#endif

}  // namespace jax_ep::gpu::slot_combine
