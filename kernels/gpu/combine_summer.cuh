// The warps of a team that load, add and store rows, and that send flags (combine_bulk.cu).
#pragma once

#include "kernels/gpu/combine_team.cuh"
#include "kernels/gpu/elements.cuh"

namespace jax_ep::gpu::team {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// One warp: turns commands into groups of loads, as groups of slots become free.
__device__ inline void IssueLoads(const CombineKernelParams& params, TeamState& team) {
  unsigned char* ring = RingOf(team);
  RingPosition from;
  RingPosition to{.parity = 1};
  for (bool stops = false; !stops; from.Advance(kBatches)) {
    BarrierWait(&team.batch_full[from.slot], from.parity);
    const Batch& batch = team.batches[from.slot];
    const uint32_t count = batch.count;
    stops = batch.stops != 0;
    if (batch.needs_fence != 0) FenceProxyAsync();  // what the scout acquired, in every lane
    for (uint32_t first = 0; first < count;
         first += params.group_rows, to.Advance(params.ring_groups)) {
      const uint32_t num_rows = min(count - first, params.group_rows);
      const bool has_row = LaneId() < num_rows;
      Command command{};
      if (has_row) command = batch.commands[first + LaneId()];
      uint32_t num_bytes = command.num_bytes;
#pragma unroll
      for (uint32_t mask = kMaxGroupRows / 2; mask > 0; mask /= 2) {
        num_bytes += FromLaneXor(num_bytes, mask);
      }
      BarrierWait(&team.empty[to.slot], to.parity);
      const uint32_t slot = to.slot * params.group_rows + LaneId();
      if (has_row) team.slots[slot] = {command.to, command.weight, command.ops};
      SyncWarp();
      if (LaneId() == 0) {
        team.counts[to.slot] = num_rows;
        BarrierExpectBytes(&team.full[to.slot], num_bytes);
      }
      if (command.num_bytes > 0) {
        BulkLoad(ring + static_cast<uint64_t>(slot) * params.slot_bytes, command.from,
                 command.num_bytes, &team.full[to.slot]);
      }
    }
    SyncWarp();
    if (LaneId() == 0) BarrierArrive(&team.batch_empty[from.slot]);
  }
}

// kDepth: sums that wait in the tree over ranks, at most.
template <typename Elem, typename Partial, uint32_t kDepth>
struct Summer {
  static constexpr uint32_t kElems = WordOf<Elem, true>::kElems;
  static constexpr uint32_t kWords = kLaneElems / kElems;
  using Values = float[kWords][kElems];

  template <typename Function>
  __device__ static void ForEach(Function&& function) {
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
#pragma unroll
      for (uint32_t e = 0; e < kElems; ++e) function(i, e);
    }
  }

  // One warp: its words of all slots.
  __device__ static void Run(const CombineKernelParams& params, TeamState& team, uint32_t warp) {
    const unsigned char* ring = RingOf(team);
    const uint32_t first_word = warp * kWords * kWarpSize + LaneId();
    Slot next;
    uint4 words[kWords];
    const auto load = [&](uint32_t slot) {
      next = team.slots[slot];
      // Lanes beyond the piece sum what the slot held before, and store nothing.
      const auto* piece = reinterpret_cast<const uint4*>(ring + slot * params.slot_bytes);
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) words[i] = piece[first_word + i * kWarpSize];
    };
    Values sums, waiting[kDepth];
    uint32_t depth = 0;
    RingPosition task;
    RingPosition at;
    uint32_t slot = 0;  // of `next`
    uint32_t end = 0;   // of its group
    while (true) {
      if (slot == end) {
        BarrierWait(&team.full[at.slot], at.parity);
        slot = at.slot * params.group_rows;
        end = slot + team.counts[at.slot];
        load(slot);
      }
      const uint32_t ops = next.ops;
      std::byte* to = next.to;
      const uint32_t num_words = ops >> kWordsShift;
      if constexpr (!std::is_same_v<Elem, Partial>) {
        if ((ops & kHasPartial) != 0) {
          const auto* partial =
              reinterpret_cast<const typename Partial::Storage*>(ring + slot * params.slot_bytes);
#pragma unroll
          for (uint32_t i = 0; i < kWords; ++i) {
            const uint32_t word = first_word + i * kWarpSize;
            if (word < num_words) LoadElems<Partial>(partial + word * kElems, sums[i]);
          }
        }
      }
      if ((ops & kBeginsSum) != 0) {
        AddRow<true>(next.weight, words, sums);
      } else if ((ops & kHasRow) != 0) {
        AddRow<false>(next.weight, words, sums);
      } else if ((ops & kIsZero) != 0) {
        ForEach([&](uint32_t i, uint32_t e) { sums[i][e] = 0.0f; });
      }
      if (++slot != end) {
        load(slot);
      } else {
        SyncWarp();
        if (LaneId() == 0) BarrierArrive(&team.empty[at.slot]);
        at.Advance(params.ring_groups);
      }
      if ((ops & kEndsSum) == 0) continue;
      if ((ops & kRounds) != 0) {
#pragma unroll
        for (uint32_t i = 0; i < kWords; ++i) RoundElems<Partial>(sums[i]);
      }
#pragma unroll 1
      for (uint32_t merges = ops >> kMergesShift & kMergesMask; merges > 0; --merges) {
        --depth;
#pragma unroll
        for (uint32_t d = 0; d < kDepth; ++d) {
          if (d != depth) continue;
          ForEach([&](uint32_t i, uint32_t e) { sums[i][e] = Add(waiting[d][i][e], sums[i][e]); });
        }
      }
      if ((ops & kPushes) != 0) {
#pragma unroll
        for (uint32_t d = 0; d < kDepth; ++d) {
          if (d != depth) continue;
          ForEach([&](uint32_t i, uint32_t e) { waiting[d][i][e] = sums[i][e]; });
        }
        ++depth;
      }
      if ((ops & kIsPartial) != 0) Store<Partial>(to, first_word, num_words, sums);
      if ((ops & kIsResult) != 0) Store<Elem>(to, first_word, num_words, sums);
      if ((ops & kEndsTask) != 0) {
        SyncWarp();
        if (LaneId() == 0) BarrierArrive(&team.task_summed[task.slot]);
        task.Advance(kTasks);
      }
      if ((ops & kStops) != 0) return;
    }
  }

 private:
  template <bool kBegins>
  __device__ static void AddRow(float weight, const uint4 (&words)[kWords], Values& sums) {
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
      float values[kElems];
      Unpack<Elem>(words[i], values);
#pragma unroll
      for (uint32_t e = 0; e < kElems; ++e) {
        const float product = Multiply(weight, values[e]);
        sums[i][e] = kBegins ? product : Add(sums[i][e], product);
      }
    }
  }

  template <typename To>
  __device__ static void Store(std::byte* to, uint32_t first_word, uint32_t num_words,
                               const Values& sums) {
    auto* elems = reinterpret_cast<typename To::Storage*>(to);
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
      const uint32_t word = first_word + i * kWarpSize;
      if (word < num_words) StoreElems<To>(elems + word * kElems, sums[i]);
    }
  }
};

// One thread.
__device__ inline void SendFlags(const CombineKernelParams& params, uint64_t sequence,
                                 TeamState& team) {
  const uint64_t value = FlagValue(sequence, Operation::kCombine);
  for (RingPosition at;; at.Advance(kTasks)) {
    BarrierWait(&team.task_summed[at.slot], at.parity);
    const Task task = team.tasks[at.slot];
    if (task.owner == kNone) return;
    BarrierArrive(&team.task_sent[at.slot]);
    // A release of what the summers stored, and the scout's rides: their arrivals came before.
    PublishChunk(params.device, task.owner, task.chunk, value);
  }
}
#endif

}  // namespace jax_ep::gpu::team
