// The plan of a routed LL dispatch in expert_major, and in expert_batched where batched_plan.cuh
// has no room.
//
// Three steps of the whole block: each warp counts a run of the pairs by expert; the runs are added
// up and zones found; each warp goes through its run again and now knows each pair's row.
#pragma once

#include "kernels/gpu/ht/plan/water_level.cuh"
#include "kernels/gpu/ll/plan/params.cuh"

namespace jax_ep::gpu {

// Ints of shared memory that a planner needs.
constexpr uint64_t LlPlanSharedInts(uint32_t num_experts, uint32_t num_histograms) {
  constexpr uint64_t kTables = 3;
  return num_experts * (kTables + num_histograms);
}

// Words: as ll::SourceWords.
template <typename Words>
class LlPlanner {
 public:
  // `ints`: shared memory of LlPlanSharedInts.
  __device__ LlPlanner(const DeviceRank& device, const LlPlanParams& params,
                       const TokenPartition& partition, const Words& words, int32_t* ints)
      : device_(device),
        params_(params),
        partition_(partition),
        words_(words),
        num_experts_(device.shape.num_experts),
        experts_(device.shape.experts_per_rank()),
        top_k_(device.shape.top_k),
        source_pairs_(params.num_tokens * device.shape.top_k),
        demand_(ints),
        zone_(demand_ + num_experts_),
        zone_begin_(zone_ + num_experts_),
        histograms_(zone_begin_ + num_experts_) {}

  // All threads of the block. Rows of the block's tokens are in `index` afterwards.
  __device__ void Run(const RowIndex& index, LlPlanTotals& totals) {
    const uint32_t num_ints = params_.num_histograms * num_experts_;
    for (uint32_t i = threadIdx.x; i < num_ints; i += blockDim.x) histograms_[i] = 0;
    SyncBlock();
    ForPairs([](const Pair&) {});
    SyncBlock();
    AddHistograms();
    FindZones();
    if (partition_.writes_totals) totals.Clear();
    SyncBlock();
    ForPairs([&](const Pair& pair) { Place(pair, index, totals); });
    SyncBlock();
    if (!partition_.writes_totals) return;
    const uint32_t first = device_.rank * experts_;
    totals.Write(
        device_, params_, [&](uint32_t e) { return Capacity(first + e); },
        [&](uint32_t e) { return zone_[first + e]; });
  }

  // Whether a row of expert_major or expert_batched has a pair.
  __device__ bool IsUsed(uint64_t row) const {
    const uint32_t first = device_.rank * experts_;
    uint32_t low = 0;
    uint32_t high = experts_;
    if (params_.layout == Layout::kExpertBatched) {  // zones of one size
      low = static_cast<uint32_t>(row) / (device_.shape.num_ranks * params_.num_tokens);
      high = low + 1;
    }
    while (high - low > 1) {  // the last expert whose zone begins at or before the row
      const uint32_t middle = (low + high) / 2;
      (zone_begin_[first + middle] <= static_cast<int32_t>(row) ? low : high) = middle;
    }
    return static_cast<int32_t>(row) - zone_begin_[first + low] < Capacity(first + low);
  }

 private:
  struct Pair {
    uint32_t source;
    uint32_t cell;  // token * K + k
    int32_t expert;
    PairKind kind;
    int32_t position;  // among the placed pairs of its expert, in the second pass
  };

  __device__ int32_t Capacity(uint32_t expert) const {
    return demand_[expert] < zone_[expert] ? demand_[expert] : zone_[expert];
  }

  // `equal`: lanes of the warp that have the same expert; they hold consecutive pairs.
  __device__ PairKind Classify(const Pair& pair, LaneMask equal) const {
    return KindOfPair(pair.expert, num_experts_, [&] {
      if (params_.layout != Layout::kExpertBatched) return false;
      const uint32_t first = pair.cell / top_k_ * top_k_;
      const uint32_t lanes = min(pair.cell - first, LaneId());  // of the token, below this one
      const LaneMask token = LanesBelow() & ~((LaneMask{1} << (LaneId() - lanes)) - 1);
      if ((equal & token) != 0) return true;
      for (uint32_t other = first; other < pair.cell - lanes; ++other) {
        if (words_.Expert(pair.source, other) == pair.expert) return true;
      }
      return false;
    });
  }

  // Each counting warp: visit(pair) for each pair of its run, whose histogram goes on counting.
  template <typename Visit>
  __device__ void ForPairs(Visit&& visit) {
    if (WarpId() >= params_.num_histograms) return;
    const uint32_t num_pairs = source_pairs_ * device_.shape.num_ranks;
    const uint32_t per_warp = static_cast<uint32_t>(
        AlignUp((num_pairs + params_.num_histograms - 1) / params_.num_histograms, kWarpSize));
    const uint32_t begin = WarpId() * per_warp;
    const uint32_t end = min(begin + per_warp, num_pairs);
    int32_t* counts = histograms_ + WarpId() * num_experts_;
    constexpr uint32_t kInFlight = 8;
    int32_t experts[kInFlight];
    for (uint32_t first = begin; first < end; first += kWarpSize) {
      const uint32_t number = first + LaneId();
      const uint32_t ordinal = (first - begin) / kWarpSize % kInFlight;
      if (ordinal == 0) {
        uint64_t loaded[kInFlight];
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) {
          const uint32_t other = number + i * kWarpSize;
          if (other < end)
            loaded[i] = words_.LoadExpert(other / source_pairs_, other % source_pairs_);
        }
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) {
          const uint32_t other = number + i * kWarpSize;
          experts[i] = other < end
                           ? words_.Expert(other / source_pairs_, other % source_pairs_, loaded[i])
                           : -1;
        }
      }
      Pair pair{.source = number / source_pairs_,
                .cell = number % source_pairs_,
                .expert = -1,
                .kind = PairKind::kAbsent,
                .position = 0};
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {  // an index into registers
        if (i == ordinal) pair.expert = experts[i];
      }
      const bool is_mine = number < end;
      const LaneMask equal = LanesWithSame(pair.expert);
      pair.kind = Classify(pair, equal);
      const bool is_placed = pair.kind == PairKind::kPlaced;
      const LaneMask same = equal & Ballot(is_placed);
      const uint32_t lower = CountLanes(same & LanesBelow());
      const int32_t before = is_placed ? counts[pair.expert] : 0;
      SyncWarp();
      if (is_placed && lower == 0) {
        counts[pair.expert] = before + static_cast<int32_t>(CountLanes(same));
      }
      SyncWarp();
      pair.position = before + static_cast<int32_t>(lower);
      if (is_mine) visit(pair);
    }
  }

  // Counts of the runs become the counts of all runs before.
  __device__ void AddHistograms() {
    for (uint32_t expert = threadIdx.x; expert < num_experts_; expert += blockDim.x) {
      int32_t sum = 0;
      for (uint32_t i = 0; i < params_.num_histograms; ++i) {
        int32_t& cell = histograms_[i * num_experts_ + expert];
        const int32_t count = cell;
        cell = sum;
        sum += count;
      }
      demand_[expert] = sum;
      if (params_.layout == Layout::kExpertMajor) continue;
      zone_[expert] = sum;
      zone_begin_[expert] =
          static_cast<int32_t>(expert % experts_ * device_.shape.num_ranks * params_.num_tokens);
    }
    SyncBlock();
  }

  // Water-filling (docs/semantics.md "Rows of each layout"), one warp per owner.
  __device__ void FindZones() {
    if (params_.layout != Layout::kExpertMajor) return;
    const uint32_t num_warps = blockDim.x / kWarpSize;
    for (uint32_t owner = WarpId(); owner < device_.shape.num_ranks; owner += num_warps) {
      FillZones(experts_, static_cast<int32_t>(device_.shape.align), params_.recv_rows,
                owner * experts_, demand_, zone_, zone_begin_);
    }
  }

  __device__ void Place(const Pair& pair, const RowIndex& index, LlPlanTotals& totals) {
    const bool is_own_source = pair.source == device_.rank;
    const uint32_t token = pair.cell / top_k_;
    const uint32_t k = pair.cell % top_k_;
    const auto expert = static_cast<uint32_t>(pair.expert);
    const bool is_placed = pair.kind == PairKind::kPlaced;
    const bool is_kept = is_placed && pair.position < Capacity(expert);
    const uint32_t owner = is_placed ? expert / experts_ : device_.shape.num_ranks;
    const bool is_here = is_kept && owner == device_.rank;
    if (partition_.writes_totals) totals.Count(device_, pair.kind, is_kept, pair.source, owner);
    if (!is_here && !is_own_source) return;
    if (!partition_.IsMine(pair.source, token)) return;
    if (is_own_source) {
      const auto source_row = static_cast<int32_t>(pair.source * params_.num_tokens + token);
      const auto rank_rows = static_cast<int32_t>(device_.shape.num_ranks * params_.num_tokens);
      params_.out.send_slot[pair.cell] =
          is_kept ? static_cast<int32_t>(owner) * rank_rows + source_row : -1;
    }
    if (!is_here) return;
    const int32_t row = zone_begin_[expert] + pair.position;
    index.Put(pair.source, token, k, row);
    params_.out.recv_src[row] =
        static_cast<int32_t>(pair.source * device_.shape.max_tokens * top_k_ + pair.cell);
  }

  const DeviceRank& device_;
  const LlPlanParams& params_;
  const TokenPartition partition_;
  const Words& words_;
  const uint32_t num_experts_, experts_, top_k_, source_pairs_;
  int32_t *demand_, *zone_, *zone_begin_, *histograms_;
};

}  // namespace jax_ep::gpu
