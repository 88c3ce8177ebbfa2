// The plan of a routed LL dispatch in layout expert_batched, where a token has each expert once and
// nothing is dropped for want of room: a pair's place in its expert's zone is the number of tokens
// before it that have the expert too. So each of this rank's experts has a bit per token of the
// group, set in any order, and counted once all are set.
#pragma once

#include "kernels/gpu/ll/plan/params.cuh"

namespace jax_ep::gpu {

inline constexpr uint32_t kBitsOfWord = 32;

// Words of an expert: those of a source are its own.
__host__ __device__ constexpr uint32_t BatchedSourceWords(uint64_t num_tokens) {
  return static_cast<uint32_t>((num_tokens + kBitsOfWord - 1) / kBitsOfWord);
}
// Words from one expert's to the next one's: odd, so that threads use different banks.
__host__ __device__ constexpr uint32_t BatchedPitch(uint32_t num_ranks, uint64_t num_tokens) {
  return num_ranks * BatchedSourceWords(num_tokens) | 1;
}
// Ints of shared memory that a planner needs.
constexpr uint64_t BatchedPlanSharedInts(const GroupShape& shape, uint64_t num_tokens) {
  constexpr uint64_t kTables = 2;
  constexpr uint64_t kIdsPerInt = 2;
  return uint64_t{shape.experts_per_rank()} *
             (BatchedPitch(shape.num_ranks, num_tokens) * kTables + 1) +
         (shape.num_ranks * num_tokens * shape.top_k + kIdsPerInt - 1) / kIdsPerInt;
}
// Ids are kept in 16 bits.
constexpr bool CanPlanBatched(const GroupShape& shape) { return shape.num_experts < 1u << 15; }

// Words: as ll::SourceWords.
template <typename Words>
class LlBatchedPlanner {
 public:
  // `ints`: shared memory of BatchedPlanSharedInts.
  __device__ LlBatchedPlanner(const DeviceRank& device, const LlPlanParams& params,
                              const TokenPartition& partition, const Words& words, int32_t* ints)
      : device_(device),
        params_(params),
        partition_(partition),
        words_(words),
        num_ranks_(device.shape.num_ranks),
        experts_(device.shape.experts_per_rank()),
        top_k_(device.shape.top_k),
        source_words_(BatchedSourceWords(params.num_tokens)),
        expert_words_(num_ranks_ * source_words_),
        pitch_(BatchedPitch(num_ranks_, params.num_tokens)),
        bits_(reinterpret_cast<uint32_t*>(ints)),
        before_(ints + experts_ * pitch_),
        counts_(before_ + experts_ * pitch_),
        ids_(reinterpret_cast<int16_t*>(counts_ + experts_)) {}

  // All threads of the block. Rows of the block's tokens are in `index` afterwards.
  __device__ void Run(const RowIndex& index, LlPlanTotals& totals) {
    for (uint32_t i = threadIdx.x; i < experts_ * pitch_; i += blockDim.x) bits_[i] = 0;
    if (partition_.writes_totals) totals.Clear();
    SyncBlock();
    SetBits();
    SyncBlock();
    CountBits();
    SyncBlock();
    PlaceOwnPairs(index);
    if (!partition_.writes_totals) return;
    AddUp(totals);
    SyncBlock();
    totals.Write(
        device_, params_, [&](uint32_t e) { return counts_[e]; },
        [&](uint32_t e) { return counts_[e]; });
  }

  // Whether a row has a pair.
  __device__ bool IsUsed(uint64_t row) const {
    const uint32_t zone = num_ranks_ * params_.num_tokens;
    const uint32_t expert = static_cast<uint32_t>(row) / zone;
    return static_cast<int32_t>(static_cast<uint32_t>(row) - expert * zone) < counts_[expert];
  }

 private:
  static constexpr int16_t kNoId = -1;
  static constexpr int16_t kInvalidId = -2;

  // `ids`: of the pair's token.
  __device__ static PairKind KindOf(const int16_t* ids, uint32_t k) {
    const int16_t id = ids[k];
    if (id == kNoId) return PairKind::kAbsent;
    if (id == kInvalidId) return PairKind::kInvalid;
    bool is_duplicate = false;
#pragma unroll 4
    for (uint32_t lower = 0; lower < k; ++lower) is_duplicate |= ids[lower] == id;
    return is_duplicate ? PairKind::kDuplicate : PairKind::kPlaced;
  }
  __device__ uint32_t WordOf(uint32_t expert, uint32_t source, uint32_t token) const {
    return expert * pitch_ + source * source_words_ + token / kBitsOfWord;
  }

  // A thread per pair, so that what a warp loads is together. Keeps the ids.
  __device__ void SetBits() {
    const uint32_t first_expert = device_.rank * experts_;
    const uint32_t source_pairs = params_.num_tokens * top_k_;
    const uint32_t num_pairs = num_ranks_ * source_pairs;
    constexpr uint32_t kInFlight = 8;
    for (uint32_t first = threadIdx.x; first < num_pairs; first += kInFlight * blockDim.x) {
      uint64_t loaded[kInFlight];
      // All of them again, as they come together; who waits longer does so for one after the other.
      constexpr uint32_t kLooks = 64;
      bool are_here = false;
      for (uint32_t look = 0; look < kLooks && !are_here; ++look) {
        are_here = true;
#pragma unroll
        for (uint32_t j = 0; j < kInFlight; ++j) {
          const uint32_t i = first + j * blockDim.x;
          if (i < num_pairs) loaded[j] = words_.LoadExpert(i / source_pairs, i % source_pairs);
        }
#pragma unroll
        for (uint32_t j = 0; j < kInFlight; ++j) {
          are_here &= first + j * blockDim.x >= num_pairs || words_.IsHere(loaded[j]);
        }
      }
#pragma unroll
      for (uint32_t j = 0; j < kInFlight; ++j) {
        const uint32_t i = first + j * blockDim.x;
        if (i >= num_pairs) continue;
        const uint32_t source = i / source_pairs;
        const uint32_t cell = i - source * source_pairs;
        const int32_t id = words_.Expert(source, cell, loaded[j]);
        const bool is_valid = static_cast<uint32_t>(id) < device_.shape.num_experts;
        ids_[i] = id < 0 ? kNoId : is_valid ? static_cast<int16_t>(id) : kInvalidId;
        const uint32_t expert = static_cast<uint32_t>(id) - first_expert;
        if (!is_valid || expert >= experts_) continue;
        const uint32_t token = cell / top_k_;
        atomicOr(bits_ + WordOf(expert, source, token), 1u << token % kBitsOfWord);
      }
    }
  }

  // A thread per expert, or a warp where experts are fewer than words.
  __device__ void CountBits() {
    if (experts_ >= expert_words_) {
      for (uint32_t expert = threadIdx.x; expert < experts_; expert += blockDim.x) {
        int32_t sum = 0;
#pragma unroll 4
        for (uint32_t i = 0; i < expert_words_; ++i) {
          const uint32_t word = expert * pitch_ + i;
          before_[word] = sum;
          sum += __popc(bits_[word]);
        }
        counts_[expert] = sum;
      }
      return;
    }
    for (uint32_t expert = WarpId(); expert < experts_; expert += blockDim.x / kWarpSize) {
      int32_t sum = 0;
      for (uint32_t first = 0; first < expert_words_; first += kWarpSize) {
        const uint32_t word = expert * pitch_ + first + LaneId();
        const bool is_one = first + LaneId() < expert_words_;
        const int32_t count = is_one ? __popc(bits_[word]) : 0;
        const int32_t inclusive = WarpInclusiveSum(count);
        if (is_one) before_[word] = sum + inclusive - count;
        sum += FromLane(inclusive, kWarpSize - 1);
      }
      if (LaneId() == 0) counts_[expert] = sum;
    }
  }

  // A thread per pair of the block's tokens.
  __device__ void PlaceOwnPairs(const RowIndex& index) {
    const uint32_t num_items = num_ranks_ * params_.num_tokens;
    const uint32_t own_items = partition_.ItemsOf(num_items);
    for (uint32_t i = threadIdx.x; i < own_items * top_k_; i += blockDim.x) {
      const auto [source, token] = partition_.ItemAt(i / top_k_);
      const uint32_t k = i % top_k_;
      const uint32_t cell = token * top_k_ + k;
      const int16_t* ids = ids_ + (source * params_.num_tokens + token) * top_k_;
      const bool is_placed = KindOf(ids, k) == PairKind::kPlaced;
      const uint32_t owner = is_placed ? static_cast<uint32_t>(ids[k]) / experts_ : num_ranks_;
      if (source == device_.rank) {
        const uint32_t source_row = source * params_.num_tokens + token;
        params_.out.send_slot[cell] =
            is_placed ? static_cast<int32_t>(owner * num_items + source_row) : -1;
      }
      if (owner != device_.rank) continue;
      const uint32_t expert = static_cast<uint32_t>(ids[k]) - device_.rank * experts_;
      const uint32_t word = WordOf(expert, source, token);
      const uint32_t below = bits_[word] & ((1u << token % kBitsOfWord) - 1);
      const int32_t row = static_cast<int32_t>(expert * num_items) + before_[word] + __popc(below);
      index.Put(source, token, k, row);
      params_.out.recv_src[row] =
          static_cast<int32_t>(source * device_.shape.max_tokens * top_k_ + cell);
    }
  }

  __device__ void AddUp(LlPlanTotals& totals) {
    const uint32_t source_pairs = params_.num_tokens * top_k_;
    for (uint32_t i = threadIdx.x; i < num_ranks_ * source_pairs; i += blockDim.x) {
      const uint32_t k = i % top_k_;
      const PairKind kind = KindOf(ids_ + i - k, k);
      totals.Count(device_, kind, kind == PairKind::kPlaced, i / source_pairs,
                   static_cast<uint32_t>(ids_[i]) / experts_);
    }
  }

  const DeviceRank& device_;
  const LlPlanParams& params_;
  const TokenPartition partition_;
  const Words& words_;
  const uint32_t num_ranks_, experts_, top_k_;
  const uint32_t source_words_, expert_words_, pitch_;
  uint32_t* bits_;   // [experts][pitch]: tokens that have the expert
  int32_t* before_;  // [experts][pitch]: how many in the words before
  int32_t* counts_;  // [experts]
  int16_t* ids_;     // [N][T * K]
};

}  // namespace jax_ep::gpu
