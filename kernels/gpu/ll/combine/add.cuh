// The adders of an LL combine with bulk copies. A warp has a piece of a token at a time: in a whole
// call it sums this rank's own rows; it waits for the partials, and adds all along the tree.
#pragma once

#include "kernels/gpu/ll/combine/sum_buffer.cuh"

namespace jax_ep::gpu::slot_combine {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <typename T, bool kIsTagged>
class LlCombineAdder {
 public:
  __device__ LlCombineAdder(const LlCombineParams& params, const ItemPartition& partition,
                            const PairTable& table, const CallSlot& slot)
      : params_(params),
        call_(params.call),
        partition_(partition),
        table_(table),
        slot_(slot),
        partials_{call_, slot.set},
        summed_here_(call_.part == CallPart::kWhole ? call_.device.rank : kNobody) {}

  // All threads of the block. state: of the warp.
  __device__ void Run(SumBufferState& state) {
    const DeviceRank& device = call_.device;
    const uint32_t top_k = device.shape.top_k;
    const uint32_t num_units = partition_.CountOf(call_.num_tokens) * call_.pieces.count;
    SumBuffer<T> buffer(params_, WarpId(), params_.add_buffer_bytes, state);
    // Tagged words do not say which program's they are, so one warp looks, aside from the others,
    // which would wait for its answer.
    if (kIsTagged && WarpId() == kWarps - 1 && !WaitBegun()) return;
    for (uint32_t unit = WarpId(); unit < num_units; unit += kWarps) {
      const uint32_t number = params_.by_pieces.Quotient(unit);
      const uint32_t piece = params_.by_pieces.Remainder(unit);
      const uint64_t token = partition_.ItemAt(number);
      int32_t slot_of_pair = kNoRow;
      if (LaneId() < top_k) slot_of_pair = call_.send_slot[token * top_k + LaneId()];
      const WordRange range = WordsOf(call_.pieces, piece, call_.row_words);
      buffer.Begin(RowsOf(table_, number, top_k), range);
      const uint32_t holder = HolderOf(slot_of_pair);
      const uint64_t holders = HoldersOf(holder, buffer.rows().count > 0);
      buffer.Finish();
      SyncWarp();  // the sum is read by other lanes than have written it
      if (!kIsTagged && unit == WarpId() && !WaitBegun()) return;
      const bool is_here =
          kIsTagged ? Gather(holders, token, piece) : WaitFor(holders, token, piece);
      if (!is_here) return;
      if (piece == 0 && call_.pair_scalars_out != nullptr) {
        WriteScalar(token, holder, buffer.rows());
      }
      WriteSum(token, range, holders, buffer.sum());
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
  // One warp: until those partials are here.
  __device__ bool WaitFor(uint64_t holders, uint64_t token, uint32_t piece) const {
    const auto is_from = [&](uint32_t peer) {
      return (holders >> peer & 1) != 0 && peer != summed_here_;
    };
    return partials_.Wait(is_from, token, piece, Value());
  }
  __device__ uint64_t Value() const { return StartFlag(slot_, call_.start_operation); }
  // One warp: until all peers are in this operation.
  __device__ bool WaitBegun() const {
    return WarpWaitFlags(call_.device, call_.area.meta_flags.At(slot_.set), 0,
                         call_.device.shape.num_ranks, call_.operation, Value());
  }
  // Where the warp has a piece of another rank's partial that came in tagged words.
  __device__ std::byte* GatheredOf(uint32_t rank) const {
    const uint32_t other = rank < summed_here_ ? rank : rank - 1;
    return ll_combine_shared + params_.table_bytes + kWarps * params_.add_buffer_bytes +
           WarpId() * params_.gather_bytes + other * params_.sum_bytes;
  }
  // One warp: brings them there. False: this rank has failed.
  __device__ bool Gather(uint64_t holders, uint64_t token, uint32_t piece) const {
    const TaggedPiece sent(call_.pieces, piece, call_.row_words, sizeof(typename T::PartialWord));
    const uint32_t num_units = sent.num_units();
    bool is_ok = true;
    for (uint32_t rank = 0; rank < call_.device.shape.num_ranks; ++rank) {
      if ((holders >> rank & 1) == 0 || rank == summed_here_) continue;
      const WideSource source = partials_.TaggedOf(rank, token, sent, slot_.started);
      auto* to = reinterpret_cast<uint4*>(GatheredOf(rank));
      constexpr uint32_t kInFlight = 2;  // units of a lane
      for (uint32_t first = LaneId(); first < num_units && is_ok; first += kInFlight * kWarpSize) {
        uint4 units[kInFlight];
        is_ok = source.Load(first, kWarpSize, num_units, units);
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) {
          const uint32_t unit = first + i * kWarpSize;
          if (unit < num_units) to[unit] = units[i];
        }
      }
    }
    return AllHaveWaited(is_ok);
  }
  // One warp: the sum over ranks, of which the one whose partials are summed here has its own in
  // `own`.
  __device__ void WriteSum(uint64_t token, WordRange range, uint64_t holders,
                           const std::byte* own) const {
    using Word = typename T::Word;
    constexpr uint32_t kBytes = sizeof(typename T::PartialWord);
    // Of a lane at once: what there are registers for.
    constexpr uint32_t kWords = T::kLevels > 3 ? 1 : (T::kLevels > 2 || kBytes > 16 ? 2 : 4);
    auto* out = reinterpret_cast<Word*>(call_.out + token * call_.row_bytes) + range.begin;
    WriteSumOfRanks<T, typename T::Elem, kWords, /*kIsUnrolled=*/true>(
        RankLeaves(call_.device.shape.num_ranks), holders != 0, {0, range.end - range.begin}, out,
        [&](uint32_t leaf, uint32_t word, LeafWords<T, kWords>& words) {
#pragma unroll
          for (uint32_t i = 0; i < kLeavesAtOnce; ++i) {
            const uint32_t rank = leaf + i;
            const bool is_here = (holders >> rank & 1) != 0;
            const std::byte* from = own;
            if (is_here && rank != summed_here_) {
              from = kIsTagged ? GatheredOf(rank)
                               : partials_.PartialOf(rank, token) + uint64_t{range.begin} * kBytes;
            }
            LoadPartial<T>(from, is_here, word, range.end - range.begin, words[i]);
          }
        });
  }
  // One warp, where the token's first piece is.
  __device__ void WriteScalar(uint64_t token, uint32_t holder, const ItemRows& rows) const {
    const uint32_t top_k = call_.device.shape.top_k;
    float scalar = 0.0f;
    if (call_.pair_scalars != nullptr && rows.count > 0) {
      const float own = rows.PairScalar(call_, 0);
      if (holder == summed_here_) scalar = own;
    }
    if (LaneId() >= top_k) return;
    if (holder != kNobody && holder != summed_here_) {
      scalar = partials_.ScalarsOf(holder, token)[LaneId()];
    }
    call_.pair_scalars_out[token * top_k + LaneId()] = scalar;
  }

  const LlCombineParams& params_;
  const SlotCombineParams& call_;
  const ItemPartition& partition_;
  const PairTable& table_;
  const CallSlot& slot_;
  SlotPartials partials_;
  uint32_t summed_here_;  // whose partials are summed here: this rank's, or nobody's
};
#endif

}  // namespace jax_ep::gpu::slot_combine
