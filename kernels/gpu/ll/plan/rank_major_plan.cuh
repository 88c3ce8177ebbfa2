// The plan of a routed LL dispatch in layout rank_major, where a row's place is its source and
// token and nothing is dropped: a block needs the ids of its own tokens alone, and may place a row
// as soon as those are here. Only the totals take the ids of all.
#pragma once

#include "kernels/gpu/ll/plan/params.cuh"

namespace jax_ep::gpu {

// Words: as ll::SourceWords.
template <typename Words>
class LlRankMajorPlanner {
 public:
  // `ints`: shared memory, one for each of this rank's experts.
  __device__ LlRankMajorPlanner(const DeviceRank& device, const LlPlanParams& params,
                                const TokenPartition& partition, const Words& words, int32_t* ints)
      : device_(device),
        params_(params),
        partition_(partition),
        words_(words),
        experts_(device.shape.experts_per_rank()),
        top_k_(device.shape.top_k),
        source_pairs_(params.num_tokens * device.shape.top_k),
        counts_(ints) {}

  // All threads of the block. Rows of the block's tokens are in `index` afterwards.
  __device__ void Run(const RowIndex& index, LlPlanTotals& totals) {
    PlaceOwnPairs(index);
    if (!partition_.writes_totals) return;
    for (uint32_t e = threadIdx.x; e < experts_; e += blockDim.x) counts_[e] = 0;
    totals.Clear();
    SyncBlock();
    AddUp(totals);
    SyncBlock();
    const auto count_of = [&](uint32_t e) { return counts_[e]; };
    totals.Write(device_, params_, count_of, count_of);
  }

 private:
  __device__ PairKind KindOf(int32_t expert) const {
    return KindOfPair(expert, device_.shape.num_experts, [] { return false; });
  }

  // A thread per pair of the block's tokens.
  __device__ void PlaceOwnPairs(const RowIndex& index) const {
    const uint32_t num_items = device_.shape.num_ranks * params_.num_tokens;
    const uint32_t own_items = partition_.ItemsOf(num_items);
    for (uint32_t i = threadIdx.x; i < own_items * top_k_; i += blockDim.x) {
      const auto [source, token] = partition_.ItemAt(i / top_k_);
      const uint32_t k = i % top_k_;
      const uint32_t cell = token * top_k_ + k;
      const int32_t expert = words_.Expert(source, cell);
      const bool is_placed = KindOf(expert) == PairKind::kPlaced;
      const uint32_t owner = is_placed ? static_cast<uint32_t>(expert) / experts_ : ~0u;
      const uint32_t source_row = source * params_.num_tokens + token;
      if (source == device_.rank) {
        params_.out.send_slot[cell] =
            is_placed ? static_cast<int32_t>(owner * num_items + source_row) : -1;
      }
      const bool is_here = owner == device_.rank;
      params_.out.recv_topk_idx[static_cast<uint64_t>(source) * source_pairs_ + cell] =
          is_here ? expert - static_cast<int32_t>(device_.rank * experts_) : -1;
      if (is_here) index.Put(source, token, k, static_cast<int32_t>(source_row));
    }
  }

  // All threads of the block: the pairs of all sources, several of a thread on their way together.
  __device__ void AddUp(LlPlanTotals& totals) const {
    const uint32_t num_pairs = device_.shape.num_ranks * source_pairs_;
    constexpr uint32_t kInFlight = 4;
    for (uint32_t first = threadIdx.x; first < num_pairs; first += kInFlight * blockDim.x) {
      uint64_t loaded[kInFlight];
#pragma unroll
      for (uint32_t j = 0; j < kInFlight; ++j) {
        const uint32_t i = first + j * blockDim.x;
        if (i < num_pairs) loaded[j] = words_.LoadExpert(i / source_pairs_, i % source_pairs_);
      }
#pragma unroll
      for (uint32_t j = 0; j < kInFlight; ++j) {
        const uint32_t i = first + j * blockDim.x;
        if (i >= num_pairs) continue;
        const uint32_t source = i / source_pairs_;
        const int32_t expert = words_.Expert(source, i - source * source_pairs_, loaded[j]);
        const PairKind kind = KindOf(expert);
        const bool is_placed = kind == PairKind::kPlaced;
        const uint32_t owner = is_placed ? static_cast<uint32_t>(expert) / experts_ : ~0u;
        totals.Count(device_, kind, is_placed, source, owner);
        if (owner == device_.rank) {
          atomicAdd(&counts_[static_cast<uint32_t>(expert) - owner * experts_], 1);
        }
      }
    }
  }

  const DeviceRank& device_;
  const LlPlanParams& params_;
  const TokenPartition partition_;
  const Words& words_;
  const uint32_t experts_, top_k_, source_pairs_;
  int32_t* counts_;  // [experts]: pairs of this rank's
};

}  // namespace jax_ep::gpu
