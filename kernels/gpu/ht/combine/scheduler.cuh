// The warp of a team that finds work and writes commands (combine_rows_in_bulk.cu).
#pragma once

#include "kernels/gpu/device/elements.cuh"
#include "kernels/gpu/ht/combine/team.cuh"
#include "kernels/gpu/protocol/row_index.cuh"
#include "kernels/gpu/sums/tree_order.h"

namespace jax_ep::gpu::team {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// The scheduler's warp. A lane has a pair (or two) of the tokens that it writes commands for, and
// what it knows of the pairs after them is on its way meanwhile.
template <typename Elem, typename Partial>
class Scheduler {
 public:
  __device__ Scheduler(const CombineKernelParams& params, uint64_t sequence, TeamState& team,
                       bool makes_partials_first)
      : params_(params),
        device_(params.device),
        sequence_(sequence),
        index_(params.device, sequence, params.num_tokens),
        team_(team),
        top_k_(params.device.shape.top_k),
        pitch_(static_cast<uint32_t>(AlignUp(top_k_, kCellWords))),
        tokens_per_batch_(min(kTokensPerChunk, kBatchCommands / pitch_)),
        kind_(makes_partials_first ? Kind::kPartials : Kind::kSums) {
#pragma unroll
    for (uint32_t i = 0; i < kLanePairs; ++i) {
      const uint32_t cell = i * kWarpSize + LaneId();
      cells_[i] = {cell / pitch_, cell % pitch_};
    }
  }

  __device__ void Run() {
    TakeNumber();
    Work work;
    Pair pairs[kLanePairs];
    while (true) {
      const Work next = WorkAfter(work);
      Pair next_pairs[kLanePairs];
      LoadPlaces(next, next_pairs);
      if (work.kind == Kind::kNone && next.kind == Kind::kNone) break;
      if (work.kind != Kind::kNone) {
        if (!Wait(work)) break;
        Write(work, pairs);
      }
      LoadWeights(next, next_pairs);
      work = next;
#pragma unroll
      for (uint32_t i = 0; i < kLanePairs; ++i) pairs[i] = next_pairs[i];
    }
    WriteTask({kNone, 0});
    Publish(1, [&](Batch& batch) {
      if (LaneId() == 0) batch.commands[0] = {.ops = kStops | kEndsTask | kEndsSum};
      batch.stops = 1;
    });
  }

 private:
  static constexpr uint32_t kTokensPerChunk = static_cast<uint32_t>(kChunkTokens);
  static constexpr uint32_t kLanePairs = kBatchCommands / kWarpSize;
  static constexpr uint32_t kCellWords = sizeof(int4) / sizeof(int32_t);  // read at once

  // The pair (token of the work, k) that a lane has; there is none where k is not below K.
  struct Cell {
    uint32_t token;
    uint32_t k;
  };

  enum class Kind : uint32_t { kNone, kPartials, kSums };
  // Tokens of one task whose commands are one batch per piece.
  struct Work {
    Kind kind = Kind::kNone;
    uint32_t owner;
    uint32_t chunk;
    uint32_t first;  // token of the chunk
    uint32_t num_tokens;
    bool begins_task, ends_task;
  };
  struct Pair {
    uint64_t entry;
    int32_t place;  // send_slot of a pair of an own token
    int32_t row;
    float weight;
  };
  // The pairs of a cell's token, as the cell's own pair sees them.
  struct TokenSummary {
    uint32_t count;         // rows here
    uint32_t lower;         // of them below the pair's own
    uint64_t remote;        // other ranks that hold rows of it
    bool is_first;          // of the pairs with rows at its rank
    uint32_t num_commands;  // of the token
    uint32_t begin;         // of them, in the batch
  };

  // Finding work. First all tasks of one kind, then all of the other.
  __device__ uint32_t NumTasks() const {
    const uint32_t num_peers = device_.shape.num_ranks - 1;
    return kind_ == Kind::kSums ? params_.num_chunks : num_peers * params_.num_chunks;
  }
  // The next task's number is taken early, so that it is here in time.
  __device__ void TakeNumber() {
    Control* control = ControlOf(device_);
    if (LaneId() != 0) return;
    number_ = atomicAdd(kind_ == Kind::kSums ? &control->sums_taken : &control->partials_taken, 1u);
  }

  // Nothing: that was all, or what follows must wait for the end of `work`.
  __device__ Work WorkAfter(const Work& work) {
    Work next = work;
    next.begins_task = work.kind == Kind::kNone || work.ends_task;
    if (!next.begins_task) {
      next.first += tokens_per_batch_;
    } else {
      next = NextTask(work.kind);
      if (next.kind == Kind::kNone) return next;
    }
    const uint32_t first_token = next.chunk * kTokensPerChunk;
    const uint32_t chunk_tokens = min(kTokensPerChunk, params_.num_tokens - first_token);
    next.num_tokens = min(tokens_per_batch_, chunk_tokens - next.first);
    next.ends_task = next.first + next.num_tokens == chunk_tokens;
    return next;
  }
  __device__ Work NextTask(Kind kind_before) {
    uint32_t number = FromLane(number_, 0);
    if (number >= NumTasks() && !is_second_kind_) {
      // A partial that is taken must not queue behind sums that wait: those are finished first.
      if (kind_before == Kind::kSums) return {};
      kind_ = kind_ == Kind::kSums ? Kind::kPartials : Kind::kSums;
      is_second_kind_ = true;
      TakeNumber();
      number = FromLane(number_, 0);
    }
    if (number >= NumTasks()) return {};
    TakeNumber();
    Work next{.kind = kind_, .begins_task = true};
    if (kind_ == Kind::kSums) {
      next.owner = device_.rank;
      next.chunk = number;
    } else {
      const uint32_t num_peers = device_.shape.num_ranks - 1;
      next.chunk = number / num_peers;
      const uint32_t step = (number % num_peers + Scatter(next.chunk)) % num_peers;
      next.owner = (device_.rank + 1 + step) % device_.shape.num_ranks;
    }
    return next;
  }
  // Sums wait for the peers' partials; what is known of their pairs comes meanwhile.
  __device__ bool Wait(const Work& work) const {
    if (work.kind != Kind::kSums) return true;
    return WaitChunk(device_, FlagValue(sequence_, Operation::kCombine, device_.program),
                     [&](uint32_t peer) { return ChunkFlag(device_, peer, work.chunk); });
  }

  // What is known of pairs. Loads only: nothing here waits for them.
  __device__ uint64_t FirstToken(const Work& work) const {
    return static_cast<uint64_t>(work.chunk) * kTokensPerChunk + work.first;
  }
  __device__ bool IsPair(const Work& work, const Cell& cell) const {
    return cell.token < work.num_tokens && cell.k < top_k_;
  }
  __device__ void LoadPlaces(const Work& work, Pair (&pairs)[kLanePairs]) const {
#pragma unroll
    for (uint32_t i = 0; i < kLanePairs; ++i) {
      pairs[i].entry = 0;
      pairs[i].place = -1;
      if (work.kind == Kind::kNone || !IsPair(work, cells_[i])) continue;
      const uint64_t token = FirstToken(work) + cells_[i].token;
      pairs[i].entry = index_.Entry(work.owner, token, cells_[i].k);
      if (work.kind == Kind::kSums) {
        pairs[i].place = params_.send_slot[token * top_k_ + cells_[i].k];
      }
    }
  }
  __device__ void LoadWeights(const Work& work, Pair (&pairs)[kLanePairs]) const {
    if (work.kind == Kind::kNone) return;
#pragma unroll
    for (uint32_t i = 0; i < kLanePairs; ++i) {
      const int32_t row = pairs[i].entry == 0 ? kNoRow : index_.RowOf(pairs[i].entry);
      pairs[i].row = row;
      pairs[i].weight =
          row >= 0 && params_.row_weights != nullptr ? params_.row_weights[row] : 1.0f;
    }
  }

  // Handing over. write(batch) in all lanes.
  template <typename WriteCommands>
  __device__ void Publish(uint32_t count, WriteCommands&& write) {
    BarrierWait(&team_.batch_empty[batch_.slot], batch_.parity);
    Batch& batch = team_.batches[batch_.slot];
    if (LaneId() == 0) {
      batch.count = count;
      batch.needs_fence = batch.stops = 0;
    }
    SyncWarp();
    write(batch);
    SyncWarp();
    if (ArrivesForWarp()) BarrierArrive(&team_.batch_full[batch_.slot]);
    batch_.Advance(kBatches);
  }
  __device__ void WriteTask(const Task& task) {
    BarrierWait(&team_.task_sent[task_.slot], task_.parity);
    if (LaneId() == 0) team_.tasks[task_.slot] = task;  // goes with the task's commands
    task_.Advance(kTasks);
  }

  // Commands.
  __device__ void Write(const Work& work, const Pair (&pairs)[kLanePairs]) {
    const bool is_sum = work.kind == Kind::kSums;
    if (!is_sum && work.begins_task) WriteTask({work.owner, work.chunk});
    SyncWarp();  // the pairs before have been read
#pragma unroll
    for (uint32_t i = 0; i < kLanePairs; ++i) {
      const uint32_t cell = i * kWarpSize + LaneId();
      team_.rows[cell] = pairs[i].row;
      if (!is_sum) continue;
      const int32_t holder = pairs[i].place / params_.rank_rows;
      // Plans come from the caller: a slot beyond the last rank is none.
      const bool is_placed =
          pairs[i].place >= 0 && holder < static_cast<int32_t>(device_.shape.num_ranks);
      team_.holders[cell] = is_placed ? holder : -1;
    }
    SyncWarp();
    TokenSummary tokens[kLanePairs];
    const uint32_t num_all =
        is_sum ? LookAtTokens<true>(work, pairs, tokens) : LookAtTokens<false>(work, pairs, tokens);
    if (is_sum ? params_.pair_scalars_out != nullptr : params_.pair_scalars != nullptr) {
      WriteScalars(work, tokens);
    }
    const bool has_rows = is_sum ? params_.out != nullptr : params_.y != nullptr;
    const uint32_t num_commands = has_rows ? num_all : 0;
    const bool ends_task = !is_sum && work.ends_task;
    if (num_commands > 0) {
      Source sources[kLanePairs];
#pragma unroll
      for (uint32_t i = 0; i < kLanePairs; ++i) {
        sources[i] = is_sum ? SourceOfSum(work, pairs[i], i, tokens[i])
                            : SourceOfPartial(work, pairs[i], i, tokens[i]);
      }
      WriteCommands(work, pairs, sources, num_commands, ends_task);
    } else if (ends_task) {
      Publish(1, [&](Batch& batch) {
        if (LaneId() == 0) batch.commands[0] = {.ops = kEndsTask | kEndsSum};
      });
    }
  }

  // What each pair sees of its token's. Number of commands of all tokens.
  template <bool kIsSum>
  __device__ uint32_t LookAtTokens(const Work& work, const Pair (&pairs)[kLanePairs],
                                   TokenSummary (&tokens)[kLanePairs]) const {
    uint32_t num_all = 0;
#pragma unroll
    for (uint32_t i = 0; i < kLanePairs; ++i) {
      const uint32_t first = cells_[i].token * pitch_;
      const uint32_t own = i * kWarpSize + LaneId();
      TokenSummary& token = tokens[i];
      token = {.is_first = true};
      const int32_t holder = kIsSum ? team_.holders[own] : -1;
      for (uint32_t cell = first; cell < first + pitch_ && cell < kBatchCommands;
           cell += kCellWords) {
        int32_t rows[kCellWords], holders[kCellWords];
        *reinterpret_cast<int4*>(rows) = *reinterpret_cast<const int4*>(team_.rows + cell);
        if constexpr (kIsSum) {
          *reinterpret_cast<int4*>(holders) = *reinterpret_cast<const int4*>(team_.holders + cell);
        }
#pragma unroll
        for (uint32_t j = 0; j < kCellWords; ++j) {
          const bool is_here = rows[j] >= 0;
          token.count += is_here;
          token.lower += is_here && rows[j] < pairs[i].row;
          if constexpr (kIsSum) {
            if (holders[j] >= 0) token.remote |= uint64_t{1} << holders[j];
            token.is_first &= cell + j >= own || holders[j] != holder;
          }
        }
      }
      if constexpr (kIsSum) token.remote &= ~(uint64_t{1} << device_.rank);
      token.num_commands = token.count + static_cast<uint32_t>(__popcll(token.remote));
      const bool is_token = cells_[i].token < work.num_tokens;
      // A sum of no rows is one, too.
      if (kIsSum && is_token && token.num_commands == 0) token.num_commands = 1;
      const bool is_counted = is_token && cells_[i].k == 0;
      const auto inclusive = static_cast<uint32_t>(
          WarpInclusiveSum(is_counted ? static_cast<int32_t>(token.num_commands) : 0));
      token.begin = num_all + inclusive - token.num_commands;
      num_all += FromLane(inclusive, kWarpSize - 1);
    }
    return num_all;
  }

  // What a pair has to load: its row, or for the first pair of a token at another rank that rank's
  // partial, or for the first pair of a token without any nothing.
  struct Source {
    bool is_one = false;
    uint32_t position;  // among the batch's commands
    uint32_t ops;
    const std::byte* from;
    std::byte* to;
    uint32_t elem_bytes;  // of what is loaded
  };
  __device__ const std::byte* RowOf(const Pair& pair) const {
    return params_.y + static_cast<uint64_t>(pair.row) * params_.row_bytes;
  }
  // Of the partial of `holder`, at its owner.
  __device__ std::byte* PlaceOfPartial(uint32_t owner, uint32_t holder, uint64_t token) const {
    const GpuHeapLayout& layout = device_.layout;
    const uint64_t block = GpuHeapLayout::ReduceBlock(device_.shape.num_ranks, owner, holder);
    const uint64_t place = block * device_.shape.max_tokens + token;
    return HeapAt<std::byte>(device_, owner, layout.reduce_rows + place * layout.reduce_pitch);
  }
  __device__ Source SourceOfPartial(const Work& work, const Pair& pair, uint32_t i,
                                    const TokenSummary& token) const {
    Source source;
    source.is_one = pair.row >= 0;
    if (!source.is_one) return source;
    source.position = token.begin + token.lower;
    source.elem_bytes = sizeof(typename Elem::Storage);
    source.from = RowOf(pair);
    source.to = PlaceOfPartial(work.owner, device_.rank, FirstToken(work) + cells_[i].token);
    source.ops = kHasRow;
    if (token.lower == 0) source.ops |= kBeginsSum;
    if (token.lower + 1 == token.count) source.ops |= kIsPartial | kEndsSum;
    return source;
  }
  __device__ Source SourceOfSum(const Work& work, const Pair& pair, uint32_t i,
                                const TokenSummary& token) const {
    Source source;
    if (!IsPair(work, cells_[i])) return source;
    const int32_t holder = team_.holders[i * kWarpSize + LaneId()];
    const bool is_remote = holder >= 0 && (token.remote >> holder & 1) != 0 && token.is_first;
    const bool is_zero = token.count == 0 && token.remote == 0 && cells_[i].k == 0;
    source.is_one = pair.row >= 0 || is_remote || is_zero;
    if (!source.is_one) return source;
    const uint64_t number = FirstToken(work) + cells_[i].token;
    source.to = params_.out + number * params_.row_bytes;
    source.position = token.begin;
    if (is_zero) {
      source.from = params_.y;
      source.ops = kIsZero | kIsResult | kEndsSum;
      source.elem_bytes = 0;
      return source;
    }
    // Own rows come first, then the partials of other ranks as the tree adds them to what is there.
    const bool has_own = token.count > 0;
    const uint64_t own = has_own ? uint64_t{1} << device_.rank : 0;
    const TreeOrder order(token.remote | own, has_own ? device_.rank : FirstOf(token.remote));
    if (pair.row >= 0) {
      source.from = RowOf(pair);
      source.elem_bytes = sizeof(typename Elem::Storage);
      source.position += token.lower;
      source.ops = kHasRow;
      if (token.lower == 0) source.ops |= kBeginsSum;
      if (token.lower + 1 == token.count) source.ops |= kRounds | kEndsSum | order.OpsOfFirst();
      return source;
    }
    const auto self = static_cast<uint32_t>(holder);
    const uint32_t before = order.NumBefore(self);
    source.position += has_own ? token.count + before - 1 : before;
    source.from = PlaceOfPartial(device_.rank, self, number);
    source.elem_bytes = sizeof(typename Partial::Storage);
    constexpr bool kIsLikeRow = std::is_same_v<Elem, Partial>;
    source.ops = (kIsLikeRow ? kHasRow : kHasPartial | kEndsSum) |
                 (before == 0 ? kBeginsSum | order.OpsOfFirst() : order.OpsOf(self));
    return source;
  }

  __device__ void WriteCommands(const Work& work, const Pair (&pairs)[kLanePairs],
                                const Source (&sources)[kLanePairs], uint32_t num_all,
                                bool ends_task) {
    const uint32_t to_bytes = work.kind == Kind::kSums ? sizeof(typename Elem::Storage)
                                                       : sizeof(typename Partial::Storage);
    const uint64_t hidden = device_.shape.hidden;
    for (uint64_t first = 0; first < hidden; first += params_.piece_elems) {
      const auto num_elems =
          static_cast<uint32_t>(min(hidden - first, static_cast<uint64_t>(params_.piece_elems)));
      const bool is_last_piece = first + num_elems == hidden;
      Publish(num_all, [&](Batch& batch) {
        if (LaneId() == 0) batch.needs_fence = work.kind == Kind::kSums && first == 0;
#pragma unroll
        for (uint32_t i = 0; i < kLanePairs; ++i) {
          const Source& source = sources[i];
          if (!source.is_one) continue;
          const bool is_last = source.position + 1 == num_all;
          batch.commands[source.position] = {
              .from = source.from + first * source.elem_bytes,
              .to = source.to + first * to_bytes,
              .weight = pairs[i].weight,
              .ops = source.ops | (ends_task && is_last_piece && is_last ? kEndsTask : 0u) |
                     num_elems / WordOf<Elem, true>::kElems << kWordsShift,
              .num_bytes = num_elems * source.elem_bytes};
        }
      });
    }
  }

  // Scalars of pairs.
  __device__ void WriteScalars(const Work& work, const TokenSummary (&tokens)[kLanePairs]) const {
#pragma unroll
    for (uint32_t i = 0; i < kLanePairs; ++i) {
      const Cell cell = cells_[i];
      if (!IsPair(work, cell)) continue;
      const uint64_t token = FirstToken(work) + cell.token;
      const bool has_rows = tokens[i].count > 0;
      if (work.kind == Kind::kPartials) {
        if (has_rows) *ScalarAt(work.owner, device_.rank, token, cell.k) = ScalarOf(cell);
        continue;
      }
      const int32_t holder = team_.holders[i * kWarpSize + LaneId()];
      float scalar = 0.0f;
      if (holder == static_cast<int32_t>(device_.rank)) {
        if (has_rows) scalar = ScalarOf(cell);
      } else if (holder >= 0) {
        scalar = *ScalarAt(device_.rank, static_cast<uint32_t>(holder), token, cell.k);
      }
      params_.pair_scalars_out[token * top_k_ + cell.k] = scalar;
    }
  }
  __device__ float* ScalarAt(uint32_t owner, uint32_t holder, uint64_t token, uint32_t k) const {
    const uint64_t block = GpuHeapLayout::ReduceBlock(device_.shape.num_ranks, owner, holder);
    return HeapAt<float>(device_, owner, device_.layout.reduce_scalars) +
           (block * device_.shape.max_tokens + token) * top_k_ + k;
  }
  // Scalar of a pair of a token with rows here.
  __device__ float ScalarOf(const Cell& cell) const {
    const int32_t* rows = team_.rows + cell.token * pitch_;
    const uint32_t k = cell.k;
    if (params_.layout != Layout::kRankMajor) {
      return rows[k] >= 0 ? params_.pair_scalars[rows[k]] : 0.0f;
    }
    for (uint32_t other = 0; other < top_k_; ++other) {
      if (rows[other] < 0) continue;
      return params_.pair_scalars[static_cast<uint64_t>(rows[other]) * top_k_ + k];
    }
    return 0.0f;
  }

  const CombineKernelParams& params_;
  const DeviceRank& device_;
  uint64_t sequence_;
  RowIndex index_;
  TeamState& team_;
  uint32_t top_k_;
  uint32_t pitch_;  // cells of a token
  uint32_t tokens_per_batch_;
  Cell cells_[kLanePairs];
  Kind kind_;                    // of the tasks that are taken now
  bool is_second_kind_ = false;  // those of the other kind are all taken
  uint32_t number_ = 0;          // in lane 0: the next task
  RingPosition batch_{.parity = 1};
  RingPosition task_{.parity = 1};
};
#endif

}  // namespace jax_ep::gpu::team
