// The warps of a team that load, add and store rows, and that send flags (combine_rows_in_bulk.cu).
#pragma once

#include "kernels/gpu/device/elements.cuh"
#include "kernels/gpu/ht/combine/team.cuh"
#include "kernels/gpu/sums/token_rows.cuh"

namespace jax_ep::gpu::team {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// One warp: turns commands into loads. A group is what the next sum still wants, up to group_rows
// rows, so that reducers wait once for several rows and run through them without looking further.
__device__ inline void IssueLoads(const CombineKernelParams& params, TeamState& team) {
  unsigned char* ring = RingOf(team);
  RingPosition from;
  RingPosition oldest;     // group whose slots become free next
  uint32_t group = 0;      // the next one
  uint32_t slot = 0;       // its first
  uint32_t num_slots = 0;  // lane g: of group g
  uint32_t num_free = params.ring_slots;
  for (bool stops = false; !stops; from.Advance(kBatches)) {
    BarrierWait(&team.batch_full[from.slot], from.parity);
    const Batch& batch = team.batches[from.slot];
    const uint32_t count = batch.count;
    stops = batch.stops != 0;
    if (batch.needs_fence != 0) FenceProxyAsync();  // what the scheduler acquired, in every lane
    uint32_t num_rows;
    for (uint32_t first = 0; first < count; first += num_rows) {
      const uint32_t most = min(count - first, params.group_rows);
      Command command{};
      if (LaneId() < most) command = batch.commands[first + LaneId()];
      const LaneMask ends = Ballot((command.ops & kEndsSum) != 0);
      num_rows = ends != 0 ? static_cast<uint32_t>(__ffs(static_cast<int>(ends))) : most;
      const bool has_row = LaneId() < num_rows;
      uint32_t num_bytes = has_row ? command.num_bytes : 0;
#pragma unroll
      for (uint32_t mask = kMaxGroupRows / 2; mask > 0; mask /= 2) {
        num_bytes += FromLaneXor(num_bytes, mask);
      }
      const uint32_t begins = FromLane(command.ops, 0) & kBeginsSum;
      for (; num_free < num_rows; oldest.Advance(kGroups)) {
        BarrierWait(&team.empty[oldest.slot], oldest.parity);
        num_free += FromLane(num_slots, oldest.slot);
      }
      num_free -= num_rows;
      if (LaneId() == group) num_slots = num_rows;
      if (has_row) team.weights[group].of_row[LaneId()] = command.weight;
      if (LaneId() == num_rows - 1) {
        team.groups[group] = {command.to, command.ops | begins, static_cast<uint16_t>(slot),
                              static_cast<uint16_t>(num_rows)};
      }
      SyncWarp();
      if (LaneId() == 0) {
        BarrierExpectBytes(&team.full[group], num_bytes);
      } else if (ArrivesForWarp()) {
        BarrierArrive(&team.full[group]);
      }
      if (has_row && command.num_bytes > 0) {
        const uint32_t own = slot + LaneId();
        BulkLoad(
            ring + static_cast<uint64_t>(own < params.ring_slots ? own : own - params.ring_slots) *
                       params.slot_bytes,
            command.from, command.num_bytes, &team.full[group]);
      }
      slot += num_rows;
      if (slot >= params.ring_slots) slot -= params.ring_slots;
      group = (group + 1) % kGroups;
    }
    SyncWarp();
    if (ArrivesForWarp()) BarrierArrive(&team.batch_empty[from.slot]);
  }
}

// kLaneElems: of a piece, per lane. kDepth: sums that wait in the tree over ranks, at most.
template <typename Elem, typename Partial, uint32_t kLaneElems, uint32_t kDepth>
class Reducer {
 public:
  __device__ Reducer(const CombineKernelParams& params, TeamState& team, uint32_t warp)
      : team_(team),
        ring_(RingOf(team)),
        slot_bytes_(params.slot_bytes),
        ring_slots_(params.ring_slots),
        first_word_(warp * kWords * kWarpSize + LaneId()) {}

  // One warp: its words of all slots.
  __device__ void Run() {
    RingPosition task;
    RingPosition at;
    while (true) {
      BarrierWait(&team_.full[at.slot], at.parity);
      const Group group = team_.groups[at.slot];
      const uint32_t ops = group.ops;
      if ((ops & kHasRow) != 0) {
        AddRows(group, team_.weights[at.slot]);
      } else {
        AddOther(group);
      }
      SyncWarp();
      if (ArrivesForWarp()) BarrierArrive(&team_.empty[at.slot]);
      at.Advance(kGroups);
      if ((ops & kEndsSum) == 0) continue;
      EndSum(ops);
      const uint32_t num_words = ops >> kWordsShift;
      if constexpr (std::is_same_v<Elem, Partial>) {
        if ((ops & (kIsPartial | kIsResult)) != 0) Store<Elem>(group.to, num_words);
      } else {
        if ((ops & kIsPartial) != 0) Store<Partial>(group.to, num_words);
        if ((ops & kIsResult) != 0) Store<Elem>(group.to, num_words);
      }
      if ((ops & kEndsTask) == 0) continue;
      SyncWarp();
      if (ArrivesForWarp()) BarrierArrive(&team_.task_summed[task.slot]);
      task.Advance(kTasks);
      if ((ops & kStops) != 0) return;
    }
  }

 private:
  static constexpr uint32_t kElems = WordOf<Elem, true>::kElems;
  static constexpr uint32_t kWords = kLaneElems / kElems;

  template <typename Function>
  __device__ static void ForEach(Function&& function) {
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
#pragma unroll
      for (uint32_t e = 0; e < kElems; ++e) function(i, e);
    }
  }

  __device__ void AddRows(const Group group, const GroupWeights& weights) {
    uint32_t slot = group.slot;
    uint4 words[kWords];
    LoadRow(slot, words);
    if ((group.ops & kBeginsSum) != 0) {
      AddRow<Elem>(words, weights.of_row[0], /*is_first=*/true, sums_);
    } else {
      AddRow<Elem>(words, weights.of_row[0], /*is_first=*/false, sums_);
    }
#pragma unroll 1
    for (uint32_t i = 1; i < group.count; ++i) {
      LoadRow(slot, words);
      AddRow<Elem>(words, weights.of_row[i], /*is_first=*/false, sums_);
    }
  }
  // From a slot; then it is the next one. Lanes beyond the piece load what the slot held before,
  // and store nothing.
  __device__ void LoadRow(uint32_t& slot, uint4 (&words)[kWords]) const {
    const auto* piece = reinterpret_cast<const uint4*>(ring_ + slot * slot_bytes_) + first_word_;
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) words[i] = piece[i * kWarpSize];
    slot = slot + 1 == ring_slots_ ? 0 : slot + 1;
  }
  // A sum of no rows, or a partial of another type.
  __device__ void AddOther(const Group& group) {
    if ((group.ops & kIsZero) != 0) {
      ForEach([&](uint32_t i, uint32_t e) { sums_[i][e] = 0.0f; });
    }
    if constexpr (!std::is_same_v<Elem, Partial>) {
      if ((group.ops & kHasPartial) == 0) return;
      const bool begins = (group.ops & kBeginsSum) != 0;
      const auto* partial =
          reinterpret_cast<const typename Partial::Storage*>(ring_ + group.slot * slot_bytes_);
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) {
        const uint32_t word = first_word_ + i * kWarpSize;
        if (word >= group.ops >> kWordsShift) continue;
        float values[kElems];
        LoadElems<Partial>(partial + word * kElems, values);
#pragma unroll
        for (uint32_t e = 0; e < kElems; ++e) {
          sums_[i][e] = begins ? values[e] : Add(sums_[i][e], values[e]);
        }
      }
    }
  }
  __device__ void EndSum(uint32_t ops) {
    if ((ops & kRounds) != 0) {
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) RoundElems<Partial>(sums_[i]);
    }
#pragma unroll 1
    for (uint32_t merges = ops >> kMergesShift & kMergesMask; merges > 0; --merges) {
      --depth_;
#pragma unroll
      for (uint32_t d = 0; d < kDepth; ++d) {
        if (d != depth_) continue;
        ForEach([&](uint32_t i, uint32_t e) { sums_[i][e] = Add(waiting_[d][i][e], sums_[i][e]); });
      }
    }
    if ((ops & kPushes) == 0) return;
#pragma unroll
    for (uint32_t d = 0; d < kDepth; ++d) {
      if (d != depth_) continue;
      ForEach([&](uint32_t i, uint32_t e) { waiting_[d][i][e] = sums_[i][e]; });
    }
    ++depth_;
  }
  template <typename To>
  __device__ void Store(std::byte* to, uint32_t num_words) const {
    auto* elems = reinterpret_cast<typename To::Storage*>(to);
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
      const uint32_t word = first_word_ + i * kWarpSize;
      if (word < num_words) StoreElems<To>(elems + word * kElems, sums_[i]);
    }
  }

  TeamState& team_;
  const unsigned char* ring_;
  uint32_t slot_bytes_, ring_slots_;
  uint32_t first_word_;
  float sums_[kWords][kElems];
  float waiting_[kDepth][kWords][kElems];
  uint32_t depth_ = 0;
};

// One thread. A release takes microseconds while the wire is busy, so it is for all tasks that are
// summed by then: of what the reducers stored, and the scheduler's scalars, as their arrivals came
// before.
__device__ inline void SendFlags(const CombineKernelParams& params, uint64_t sequence,
                                 TeamState& team) {
  const uint64_t value = FlagValue(sequence, Operation::kCombine, params.device.program);
  RingPosition at;
  for (bool is_over = false; !is_over;) {
    RingPosition end = at;
    uint32_t count = 0;
    do {
      BarrierWait(&team.task_summed[end.slot], end.parity);
      is_over = team.tasks[end.slot].owner == kNone;
      if (is_over) break;
      end.Advance(kTasks);
      ++count;
    } while (count < kTasks / 2 && BarrierIsOver(&team.task_summed[end.slot], end.parity));
    if (count > 0) FenceSys();
    for (; count > 0; --count, at.Advance(kTasks)) {
      const Task task = team.tasks[at.slot];
      BarrierArrive(&team.task_sent[at.slot]);
      StoreRelaxedSys(ChunkFlagAt(params.device, task.owner, task.chunk), value);
    }
  }
}
#endif

}  // namespace jax_ep::gpu::team
