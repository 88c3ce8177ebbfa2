// Second part of a plan in one kernel: every block reads the counts of all slices of all ranks, and
// knows where the pairs of any slice go. It takes slices in turn, and of its own rank's writes
// send_slot, of all the rows here. What follows from the counts alone is the first block's part.
#pragma once

#include "kernels/gpu/ht/plan/count_slices.cuh"
#include "kernels/gpu/ht/plan/expert_zones.cuh"

namespace jax_ep::gpu::planning {

// Slices of all ranks are numbered by source, then in the order of their pairs.
class SlicePlacer {
 public:
  static constexpr uint32_t kNoSlice = ~0u;

  // Blocks that begin with a slice, and take others in turn: all but the first one, unless there is
  // no other.
  __device__ static uint32_t NumWorkers() { return gridDim.x > 1 ? gridDim.x - 1 : 1; }
  // kNoSlice: this block is none of those.
  __device__ static uint32_t FirstSlice() {
    if (gridDim.x == 1) return 0;
    return blockIdx.x == 0 ? kNoSlice : blockIdx.x - 1;
  }

  // ints: shared memory, SharedBytes.
  __device__ SlicePlacer(const PlanKernelParams& params, uint64_t sequence, uint64_t set,
                         int32_t* ints)
      : params_(params),
        device_(params.device),
        sequence_(sequence),
        set_(set),
        num_experts_(params.device.shape.num_experts),
        experts_(params.device.shape.experts_per_rank()),
        num_slices_(params.device.shape.num_ranks * params.num_blocks),
        pitch_(CountsPitch(num_experts_)),
        zones_(ints, num_experts_),
        before_(ints + ExpertZones::kNumTables * num_experts_),
        counts_(reinterpret_cast<uint16_t*>(ints) + CountsOffset(num_experts_)) {}

  static constexpr uint32_t SharedBytes(uint32_t num_experts, uint32_t num_slices) {
    return (CountsOffset(num_experts) + num_slices * CountsPitch(num_experts)) *
           static_cast<uint32_t>(sizeof(uint16_t));
  }

  // All threads of the block, before Run: waits for a moment. A bit for each slice of this rank
  // whose counts have not come.
  __device__ uint32_t MissingSlices() {
    // More than blocks that run mostly take to count.
    constexpr uint64_t kPatienceNs = 20'000;
    __shared__ uint32_t missing, has_all, is_ok;
    static_assert(kMaxGroupSlices <= kThreads && kMaxPlanSlices <= 32);
    if (threadIdx.x == 0) {
      missing = 0;
      has_all = is_ok = SawFailure(device_) ? 0 : 1;
    }
    SyncBlock();
    // Those of peers, too, which mostly come, but not for longer: they may need ours.
    const uint32_t slice = threadIdx.x;
    if (slice < num_slices_ && is_ok != 0 &&
        !FlagComesSoon(FlagOf(slice), FlagOfPlan(), kPatienceNs)) {
      has_all = 0;
      const uint32_t of_rank = slice - device_.rank * params_.num_blocks;
      if (SourceOf(slice) == device_.rank && !HasFailed(device_)) atomicOr(&missing, 1u << of_rank);
    }
    SyncBlock();
    has_all_counts_ = has_all != 0;
    return missing;
  }

  // All threads of the block. False: this rank has failed.
  __device__ bool Run() {
    if (!has_all_counts_ && !WaitForCounts()) return false;
    const uint32_t first = min(FirstSlice(), num_slices_);
    Load(first);  // on its way while the zones are found
    if (!CopyCounts()) return false;
    FindZones(first);
    for (uint32_t slice = first; slice < num_slices_; slice += NumWorkers()) {
      if (slice != first) AddUpBefore(slice);
      Place(slice);
      SyncBlock();  // before_ can be written again
    }
    FillPadding();
    if (blockIdx.x == 0) WriteCounts();
    return true;
  }

 private:
  static constexpr uint32_t kUnit = kWireUnitBytes / sizeof(uint16_t);

  // In counts: of a slice, and where they begin, behind the tables.
  static constexpr uint32_t CountsPitch(uint32_t num_experts) {
    return static_cast<uint32_t>(AlignUp(num_experts, kUnit));
  }
  static constexpr uint32_t CountsOffset(uint32_t num_experts) {
    constexpr uint32_t kTables = ExpertZones::kNumTables + 1;
    return static_cast<uint32_t>(
        AlignUp(kTables * num_experts * (sizeof(int32_t) / sizeof(uint16_t)), kUnit));
  }

  __device__ uint32_t SourceOf(uint32_t slice) const { return slice / params_.num_blocks; }
  __device__ int32_t CountOf(uint32_t slice, uint32_t expert) const {
    return counts_[slice * pitch_ + expert];
  }

  __device__ uint64_t FlagOfPlan() const {
    return FlagValue(sequence_, Operation::kPlan, device_.program);
  }
  __device__ const uint64_t* FlagOf(uint32_t slice) const {
    const uint32_t source = SourceOf(slice);
    return OwnHeapAt<uint64_t>(device_,
                               SliceFlag(device_, source, slice - source * params_.num_blocks));
  }

  __device__ bool WaitForCounts() const {
    __shared__ uint32_t is_ok;
    if (threadIdx.x == 0) is_ok = SawFailure(device_) ? 0 : 1;
    SyncBlock();
    const uint32_t slice = threadIdx.x;
    if (slice < num_slices_ && is_ok != 0 &&
        !WaitFlag(device_, FlagOf(slice), SourceOf(slice), Operation::kPlan, FlagOfPlan())) {
      is_ok = 0;
    }
    SyncBlock();
    return is_ok != 0;
  }

  // What the thread reads of a slice first, on its way while something else is done.
  __device__ void Load(uint32_t slice) {
    loaded_ = slice;
    if (slice >= num_slices_) return;
    const PairRange range = RangeOf(slice);
    const uint32_t source = SourceOf(slice);
    const bool is_active = IsActive(device_, source);
    const PairEntry* from = EntriesOf(device_, set_, source);
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t pair = range.begin + i * kThreads + threadIdx.x;
      entries_[i] = pair < range.end && is_active ? from[pair] : PairEntry{PairEntry::kNone};
    }
  }
  __device__ PairRange RangeOf(uint32_t slice) const {
    const uint32_t number = slice % params_.num_blocks;
    const uint32_t begin = min(number * params_.pairs_per_block, params_.num_pairs);
    return {begin, min(begin + params_.pairs_per_block, params_.num_pairs)};
  }

  // Into shared memory. False: a peer runs another plan.
  __device__ bool CopyCounts() {
    __shared__ uint32_t is_same_plan;
    if (threadIdx.x == 0) is_same_plan = 1;
    PlanHeader header{};
    if (threadIdx.x < num_slices_) header = HeaderOf(threadIdx.x);
    const uint32_t units = pitch_ / kUnit;
    constexpr uint32_t kInFlight = 4;
    for (uint32_t first = threadIdx.x; first < num_slices_ * units; first += kInFlight * kThreads) {
      uint4 words[kInFlight];
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        const uint32_t at = first + i * kThreads;
        if (at >= num_slices_ * units) continue;
        const uint32_t slice = at / units;
        words[i] = reinterpret_cast<const uint4*>(SliceOf(slice)->counts())[at - slice * units];
      }
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        const uint32_t at = first + i * kThreads;
        if (at < num_slices_ * units) reinterpret_cast<uint4*>(counts_)[at] = words[i];
      }
    }
    SyncBlock();
    if (threadIdx.x < num_slices_ && !IsOfThisPlan(header)) {
      is_same_plan = 0;
      Fail(device_, FailureKind::kWrongOrder, Operation::kPlan, SourceOf(threadIdx.x), FlagOfPlan(),
           FlagValue(sequence_, Operation::kPlan, header.program));
    }
    SyncBlock();
    return is_same_plan != 0;
  }
  __device__ bool IsOfThisPlan(const PlanHeader& header) const {
    return header.num_tokens == static_cast<int32_t>(params_.num_tokens) &&
           header.recv_rows == params_.recv_rows &&
           header.layout == static_cast<uint16_t>(params_.layout) &&
           header.program == device_.program;
  }
  __device__ SliceHeader* SliceOf(uint32_t slice) const {
    const uint32_t source = SourceOf(slice);
    return SliceAt(device_, device_.rank, set_, source, slice - source * params_.num_blocks);
  }
  __device__ PlanHeader HeaderOf(uint32_t slice) const { return SliceOf(slice)->plan; }

  // Pairs of an expert in the slices [begin, end).
  __device__ int32_t PairsIn(uint32_t begin, uint32_t end, uint32_t expert) const {
    int32_t sum = 0;
#pragma unroll 8
    for (uint32_t slice = begin; slice < end; ++slice) sum += CountOf(slice, expert);
    return sum;
  }
  // Also what AddUpBefore finds for the slice `first`.
  __device__ void FindZones(uint32_t first) {
    for (uint32_t expert = threadIdx.x; expert < num_experts_; expert += kThreads) {
      before_[expert] = PairsIn(0, first, expert);
      zones_.demand[expert] = before_[expert] + PairsIn(first, num_slices_, expert);
    }
    SyncBlock();
    zones_.Find(params_);
    SyncBlock();
  }

  // Positions of a slice's first pairs among all of their experts.
  __device__ void AddUpBefore(uint32_t slice) {
    for (uint32_t expert = threadIdx.x; expert < num_experts_; expert += kThreads) {
      before_[expert] = PairsIn(0, slice, expert);
    }
    SyncBlock();
  }

  __device__ void Place(uint32_t slice) {
    const PairRange range = RangeOf(slice);
    const uint32_t source = SourceOf(slice);
    const bool is_active = IsActive(device_, source);
    const PairEntry* from = EntriesOf(device_, set_, source);
    for (uint32_t first = range.begin; first < range.end; first += kBatch * kThreads) {
      PairEntry entries[kBatch];
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        const uint32_t pair = first + i * kThreads + threadIdx.x;
        if (first == range.begin && loaded_ == slice) {
          entries[i] = entries_[i];
        } else {
          entries[i] = pair < range.end && is_active ? from[pair] : PairEntry{PairEntry::kNone};
        }
      }
      if (first == range.begin) Load(slice + NumWorkers());
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        const uint32_t pair = first + i * kThreads + threadIdx.x;
        if (pair - threadIdx.x < range.end) PlacePair(source, pair, pair < range.end, entries[i]);
      }
    }
  }

  // All threads of the block, each a pair of the source, or none (!is_pair).
  __device__ void PlacePair(uint32_t source, uint32_t pair, bool is_pair, PairEntry entry) const {
    const bool has_place = is_pair && entry.HasPlace();
    const uint32_t expert = has_place ? entry.expert() : 0;
    const uint32_t owner = params_.by_experts_per_rank.Quotient(expert);
    const int32_t position = before_[expert] + static_cast<int32_t>(entry.number());
    const bool is_kept = has_place && position < zones_.Capacity(params_, expert);
    const int32_t row = zones_.zone_begin[expert] + position;
    const uint32_t token = params_.by_top_k.Quotient(pair);
    const auto source_row = static_cast<int32_t>(source * params_.num_tokens + token);
    const bool is_rank_major = params_.layout == Layout::kRankMajor;
    if (is_pair && source == device_.rank) {
      int32_t slot =
          static_cast<int32_t>(owner) * params_.recv_rows + (is_rank_major ? source_row : row);
      if (params_.mode == Mode::kLl) {
        slot =
            static_cast<int32_t>(owner * device_.shape.num_ranks * params_.num_tokens) + source_row;
      }
      params_.out.send_slot[pair] = is_kept ? slot : -1;
    }
    const bool is_here = has_place && owner == device_.rank;
    const auto code =
        static_cast<int32_t>(source * device_.shape.max_tokens * device_.shape.top_k + pair);
    if (is_rank_major) {
      PlaceInToken(source, pair, is_pair, is_here, expert, code);
    } else if (is_here && is_kept) {
      params_.out.recv_src[row] = code;
    }
  }

  // All threads of the block, in rank_major. The first of a token's pairs that are here writes its
  // row; if none is, the last of all.
  __device__ void PlaceInToken(uint32_t source, uint32_t pair, bool is_pair, bool is_here,
                               uint32_t expert, int32_t code) const {
    const uint32_t top_k = device_.shape.top_k;
    const LaneMask here = Ballot(is_here);
    if (!is_pair) return;
    params_.out.recv_topk_idx[static_cast<uint64_t>(source) * params_.num_pairs + pair] =
        is_here ? static_cast<int32_t>(expert - device_.rank * experts_) : -1;
    const uint32_t token = params_.by_top_k.Quotient(pair);
    const uint32_t k = pair - token * top_k;
    if (!is_here && k + 1 != top_k) return;
    const uint32_t in_warp = min(k, LaneId());  // lower pairs of the token
    if ((here & LanesBelow() & ~((LaneMask{1} << (LaneId() - in_warp)) - 1)) != 0) return;
    const uint32_t first = IsActive(device_, source) ? pair - k : pair - in_warp;
    for (uint32_t lower = first; lower < pair - in_warp; ++lower) {
      const PairEntry other = EntriesOf(device_, set_, source)[lower];
      if (!other.HasPlace()) continue;
      if (params_.by_experts_per_rank.Quotient(other.expert()) == device_.rank) return;
    }
    params_.out.recv_src[source * params_.num_tokens + token] = is_here ? code : -1;
  }

  // Rows of expert_major and expert_batched without a pair: a warp for each of this rank's experts,
  // and all for what is behind the last zone.
  __device__ void FillPadding() const {
    if (params_.layout == Layout::kRankMajor) return;
    const uint32_t own_first = device_.rank * experts_;
    const uint32_t num_warps = gridDim.x * kWarps;
    const uint32_t warp = WarpId() * gridDim.x + blockIdx.x;
    for (uint32_t e = warp; e < experts_; e += num_warps) {
      const int32_t begin = zones_.zone_begin[own_first + e];
      const int32_t end = begin + zones_.RowsOf(params_, own_first + e);
      const int32_t used = zones_.Capacity(params_, own_first + e);
      for (int32_t row = begin + used + static_cast<int32_t>(LaneId()); row < end;
           row += static_cast<int32_t>(kWarpSize)) {
        params_.out.recv_src[row] = -1;
      }
    }
    const uint32_t last = own_first + experts_ - 1;
    const int32_t end = zones_.zone_begin[last] + zones_.RowsOf(params_, last);
    for (int32_t row = end + static_cast<int32_t>(warp * kWarpSize + LaneId());
         row < params_.recv_rows; row += static_cast<int32_t>(num_warps * kWarpSize)) {
      params_.out.recv_src[row] = -1;
    }
  }

  // All threads of one block: what follows from the counts.
  __device__ void WriteCounts() const {
    __shared__ int32_t send_counts[kMaxNodeRanks], recv_counts[kMaxNodeRanks];
    __shared__ int32_t num_dropped, has_drops;
    const uint32_t num_ranks = device_.shape.num_ranks;
    for (uint32_t i = threadIdx.x; i < num_ranks; i += kThreads) {
      send_counts[i] = recv_counts[i] = 0;
    }
    if (threadIdx.x == 0) num_dropped = has_drops = 0;
    SyncBlock();
    for (uint32_t expert = threadIdx.x; expert < num_experts_; expert += kThreads) {
      const int32_t capacity = zones_.Capacity(params_, expert);
      const uint32_t owner = expert / experts_;
      const bool is_here = owner == device_.rank;
      if (is_here) {
        const uint32_t e = expert - owner * experts_;
        params_.out.group_counts[e] = capacity;
        params_.out.group_sizes[e] =
            params_.layout == Layout::kExpertMajor ? zones_.zone[expert] : capacity;
        if (params_.counts_load) {
          CountUp(OwnHeapAt<uint64_t>(device_, device_.layout.pairs_per_expert) + e,
                  static_cast<uint64_t>(capacity));
        }
      }
      int32_t before = 0;
      for (uint32_t source = 0; source < num_ranks; ++source) {
        int32_t count = 0;
        for (uint32_t i = 0; i < params_.num_blocks; ++i) {
          count += CountOf(source * params_.num_blocks + i, expert);
        }
        const int32_t left = capacity - before;
        const int32_t kept = left < 0 ? 0 : min(left, count);
        before += count;
        if (is_here && kept > 0) atomicAdd(&recv_counts[source], kept);
        if (source != device_.rank) continue;
        if (kept > 0) atomicAdd(&send_counts[owner], kept);
        if (count > kept) atomicAdd(&num_dropped, count - kept);
      }
      if (capacity < before) has_drops = 1;
    }
    for (uint32_t slice = threadIdx.x; slice < num_slices_; slice += kThreads) {
      const int32_t dropped = HeaderOf(slice).num_locally_dropped;
      if (dropped == 0) continue;
      has_drops = 1;
      if (SourceOf(slice) == device_.rank) atomicAdd(&num_dropped, dropped);
    }
    SyncBlock();
    for (uint32_t i = threadIdx.x; i < num_ranks; i += kThreads) {
      params_.out.send_counts[i] = send_counts[i];
      params_.out.recv_counts[i] = recv_counts[i];
    }
    if (threadIdx.x != 0) return;
    *params_.out.num_dropped = num_dropped;
    *params_.out.overflow = has_drops;
    CountPlan(device_, num_dropped, has_drops != 0);
  }

  const PlanKernelParams& params_;
  const DeviceRank& device_;
  const uint64_t sequence_, set_;
  const uint32_t num_experts_, experts_, num_slices_, pitch_;
  ExpertZones zones_;
  int32_t* before_;   // [E]
  uint16_t* counts_;  // [slices of all ranks][pitch]
  bool has_all_counts_ = false;
  uint32_t loaded_ = kNoSlice;
  PairEntry entries_[kBatch];
};

}  // namespace jax_ep::gpu::planning
