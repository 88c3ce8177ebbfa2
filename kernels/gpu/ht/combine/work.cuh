// What a team of combine_rows_in_bulk.cu does next: partials for other owners and sums of own
// tokens, taken from counters that all teams of the rank share.
#pragma once

#include "kernels/gpu/ht/combine/combine_params.h"
#include "kernels/gpu/protocol/control.cuh"
#include "kernels/gpu/protocol/row_index.cuh"

namespace jax_ep::gpu::team {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr uint32_t kTokensPerChunk = static_cast<uint32_t>(kChunkTokens);

enum class WorkKind : uint32_t { kNone, kPartials, kSums };
// Tokens of one task whose commands are one batch per piece.
struct Work {
  WorkKind kind = WorkKind::kNone;
  uint32_t owner;
  uint32_t chunk;
  uint32_t first;  // token of the chunk
  uint32_t num_tokens;
  bool begins_task, ends_task;
};

// One warp. First all tasks of one kind, then all of the other.
class WorkQueue {
 public:
  __device__ WorkQueue(const CombineKernelParams& params, uint32_t tokens_per_batch,
                       bool makes_partials_first)
      : params_(params),
        tokens_per_batch_(tokens_per_batch),
        kind_(makes_partials_first ? WorkKind::kPartials : WorkKind::kSums) {
    TakeNumber();
  }

  // Nothing: that was all, or what follows must wait for the end of `work`.
  __device__ Work After(const Work& work) {
    Work next = work;
    next.begins_task = work.kind == WorkKind::kNone || work.ends_task;
    if (!next.begins_task) {
      next.first += tokens_per_batch_;
    } else {
      next = NextTask(work.kind);
      if (next.kind == WorkKind::kNone) return next;
    }
    const uint32_t first_token = next.chunk * kTokensPerChunk;
    const uint32_t chunk_tokens = min(kTokensPerChunk, params_.num_tokens - first_token);
    next.num_tokens = min(tokens_per_batch_, chunk_tokens - next.first);
    next.ends_task = next.first + next.num_tokens == chunk_tokens;
    return next;
  }

 private:
  __device__ uint32_t NumTasks() const {
    const uint32_t num_peers = params_.device.shape.num_ranks - 1;
    return kind_ == WorkKind::kSums ? params_.num_chunks : num_peers * params_.num_chunks;
  }
  // The next task's number is taken early, so that it is here in time.
  __device__ void TakeNumber() {
    Control* control = ControlOf(params_.device);
    if (LaneId() != 0) return;
    number_ =
        atomicAdd(kind_ == WorkKind::kSums ? &control->sums_taken : &control->partials_taken, 1u);
  }

  __device__ Work NextTask(WorkKind kind_before) {
    uint32_t number = FromLane(number_, 0);
    if (number >= NumTasks() && !is_second_kind_) {
      // A partial that is taken must not queue behind sums that wait: those are finished first.
      if (kind_before == WorkKind::kSums) return {};
      kind_ = kind_ == WorkKind::kSums ? WorkKind::kPartials : WorkKind::kSums;
      is_second_kind_ = true;
      TakeNumber();
      number = FromLane(number_, 0);
    }
    if (number >= NumTasks()) return {};
    TakeNumber();
    Work next{.kind = kind_, .begins_task = true};
    if (kind_ == WorkKind::kSums) {
      next.owner = params_.device.rank;
      next.chunk = number;
    } else {
      const uint32_t num_peers = params_.device.shape.num_ranks - 1;
      next.chunk = number / num_peers;
      const uint32_t step = (number % num_peers + Scatter(next.chunk)) % num_peers;
      next.owner = (params_.device.rank + 1 + step) % params_.device.shape.num_ranks;
    }
    return next;
  }

  const CombineKernelParams& params_;
  uint32_t tokens_per_batch_;
  WorkKind kind_;                // of the tasks that are taken now
  bool is_second_kind_ = false;  // those of the other kind are all taken
  uint32_t number_ = 0;          // in lane 0: the next task
};
#endif

}  // namespace jax_ep::gpu::team
