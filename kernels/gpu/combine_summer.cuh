// The warps of a team that load, add and store rows, and that send flags (combine_bulk.cu).
#pragma once

#include "kernels/gpu/combine_team.cuh"
#include "kernels/gpu/elements.cuh"

namespace jax_ep::gpu::team {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// One thread.
__device__ inline void IssueLoads(const CombineKernelParams& params, TeamState& team) {
  unsigned char* ring = RingOf(params, team);
  RingPosition at{.parity = 1};
  uint32_t issued = 0;
  while (true) {
    const uint32_t written = LoadAcquireBlock(&team.commands_written);
    while (issued != written) {
      const Command command = team.commands[issued % kCommands];
      StoreReleaseBlock(&team.commands_issued, ++issued);
      BarrierWait(&team.empty[at.slot], at.parity);
      team.slots[at.slot] = {command.to, command.weight, command.ops};
      if ((command.ops & kNeedsFence) != 0) FenceProxyAsync();
      if (command.num_bytes > 0) {
        BarrierExpectBytes(&team.full[at.slot], command.num_bytes);
        BulkLoad(ring + static_cast<uint64_t>(at.slot) * params.slot_bytes, command.from,
                 command.num_bytes, &team.full[at.slot]);
      } else {
        BarrierArrive(&team.full[at.slot]);
      }
      at.Advance(params.ring_slots);
      if ((command.ops & kStops) != 0) return;
    }
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
    const unsigned char* ring = RingOf(params, team);
    const uint32_t first_word = warp * kWords * kWarpSize + LaneId();
    Values sums, waiting[kDepth];
    Clear(sums);
    uint32_t depth = 0;
    uint32_t num_tasks = 0;
    for (RingPosition at;; at.Advance(params.ring_slots)) {
      BarrierWait(&team.full[at.slot], at.parity);
      const Slot slot = team.slots[at.slot];
      const uint32_t ops = slot.ops;
      const uint32_t num_words = ops >> kWordsShift;
      const unsigned char* piece = ring + static_cast<uint64_t>(at.slot) * params.slot_bytes;
      if ((ops & kHasRow) != 0) {
        const auto* row = reinterpret_cast<const uint4*>(piece);
        uint4 words[kWords];
#pragma unroll
        for (uint32_t i = 0; i < kWords; ++i) {
          // Lanes beyond the piece sum what the slot held before, and store nothing.
          words[i] = row[min(first_word + i * kWarpSize, params.slot_words - 1)];
        }
        SyncWarp();
        if (LaneId() == 0) BarrierArrive(&team.empty[at.slot]);
#pragma unroll
        for (uint32_t i = 0; i < kWords; ++i) {
          float values[kElems];
          Unpack<Elem>(words[i], values);
#pragma unroll
          for (uint32_t e = 0; e < kElems; ++e) {
            sums[i][e] = Add(sums[i][e], Multiply(slot.weight, values[e]));
          }
        }
        if ((ops & kEndsSum) == 0) continue;
      } else {
        if ((ops & kHasPartial) != 0) {
          const auto* partial = reinterpret_cast<const typename Partial::Storage*>(piece);
#pragma unroll
          for (uint32_t i = 0; i < kWords; ++i) {
            const uint32_t word = first_word + i * kWarpSize;
            if (word < num_words) LoadElems<Partial>(partial + word * kElems, sums[i]);
          }
        }
        SyncWarp();
        if (LaneId() == 0) BarrierArrive(&team.empty[at.slot]);
        if ((ops & kIsZero) != 0) {
          ForEach([&](uint32_t i, uint32_t e) { sums[i][e] = 0.0f; });
        }
      }
      if ((ops & kRounds) != 0) {
#pragma unroll
        for (uint32_t i = 0; i < kWords; ++i) {
          typename Partial::Storage rounded[kElems];
#pragma unroll
          for (uint32_t e = 0; e < kElems; ++e) rounded[e] = Partial::Store(sums[i][e]);
#pragma unroll
          for (uint32_t e = 0; e < kElems; ++e) sums[i][e] = Partial::Load(rounded[e]);
        }
      }
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
      if ((ops & kIsPartial) != 0) Store<Partial>(slot.to, first_word, num_words, sums);
      if ((ops & kIsResult) != 0) Store<Elem>(slot.to, first_word, num_words, sums);
      if ((ops & kEndsTask) != 0) {
        SyncWarp();
        if (LaneId() == 0) StoreReleaseBlock(&team.tasks_summed[warp], ++num_tasks);
      }
      if ((ops & kStops) != 0) return;
      Clear(sums);
    }
  }

 private:
  // Minus zero plus x is x, for zeroes too.
  __device__ static void Clear(Values& sums) {
    ForEach([&](uint32_t i, uint32_t e) { sums[i][e] = -0.0f; });
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

// One warp.
__device__ inline void SendFlags(const CombineKernelParams& params, uint64_t sequence,
                                 TeamState& team) {
  const DeviceRank& device = params.device;
  const uint64_t value = FlagValue(sequence, Operation::kCombine);
  for (uint32_t sent = 0;; ++sent) {
    while (LoadAcquireBlock(&team.tasks_written) == sent) SleepBriefly();
    SyncWarp();
    const Task task = team.tasks[sent % kTasks];
    if (task.owner == kNone) return;
    while (!AllLanes(LaneId() >= params.summers ||
                     LoadAcquireBlock(&team.tasks_summed[LaneId()]) > sent)) {
      SleepBriefly();
    }
    SyncWarp();
    if (LaneId() != 0) continue;
    PublishChunk(device, task.owner, task.chunk, value);  // stored by the summers; rides too
    StoreReleaseBlock(&team.tasks_sent, sent + 1);
  }
}
#endif

}  // namespace jax_ep::gpu::team
