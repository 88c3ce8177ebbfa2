// The warp of a team that writes the commands for its work (work.cuh, combine_rows_in_bulk.cu).
#pragma once

#include "kernels/gpu/device/elements.cuh"
#include "kernels/gpu/ht/combine/team.cuh"
#include "kernels/gpu/ht/combine/work.cuh"
#include "kernels/gpu/protocol/row_index.cuh"
#include "kernels/gpu/sums/tree.h"

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
        queue_(params, min(kTokensPerChunk, kBatchCommands / pitch_), makes_partials_first) {
#pragma unroll
    for (uint32_t i = 0; i < kLanePairs; ++i) {
      const uint32_t cell = i * kWarpSize + LaneId();
      cells_[i] = {cell / pitch_, cell % pitch_};
    }
  }

  __device__ void Run() {
    Work work;
    Pair pairs[kLanePairs];
    while (true) {
      const Work next = queue_.After(work);
      Pair next_pairs[kLanePairs];
      LoadPlaces(next, next_pairs);
      if (work.kind == WorkKind::kNone && next.kind == WorkKind::kNone) break;
      if (work.kind != WorkKind::kNone) {
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
  static constexpr uint32_t kLanePairs = kBatchCommands / kWarpSize;
  static constexpr uint32_t kCellWords = sizeof(int4) / sizeof(int32_t);  // read at once

  static constexpr uint64_t kOwnLeaf = 1;  // in the tree over ranks (tree.h)

  // The pair (token of the work, k) that a lane has; there is none where k is not below K.
  struct Cell {
    uint32_t token;
    uint32_t k;
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
    uint64_t remote;        // leaves of other ranks that hold rows of it
    bool is_first;          // of the pairs with rows at its rank
    uint32_t num_commands;  // of the token
    uint32_t begin;         // of them, in the batch
  };

  // Sums wait for the peers' partials; what is known of their pairs comes meanwhile.
  __device__ bool Wait(const Work& work) const {
    if (work.kind != WorkKind::kSums) return true;
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
      if (work.kind == WorkKind::kNone || !IsPair(work, cells_[i])) continue;
      const uint64_t token = FirstToken(work) + cells_[i].token;
      pairs[i].entry = index_.Entry(work.owner, token, cells_[i].k);
      if (work.kind == WorkKind::kSums) {
        pairs[i].place = params_.send_slot[token * top_k_ + cells_[i].k];
      }
    }
  }
  __device__ void LoadWeights(const Work& work, Pair (&pairs)[kLanePairs]) const {
    if (work.kind == WorkKind::kNone) return;
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
    const bool is_sum = work.kind == WorkKind::kSums;
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
      team_.leaves[cell] = is_placed ? holder ^ static_cast<int32_t>(device_.rank) : -1;
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
      const int32_t leaf = kIsSum ? team_.leaves[own] : -1;
      for (uint32_t cell = first; cell < first + pitch_ && cell < kBatchCommands;
           cell += kCellWords) {
        int32_t rows[kCellWords], leaves[kCellWords];
        *reinterpret_cast<int4*>(rows) = *reinterpret_cast<const int4*>(team_.rows + cell);
        if constexpr (kIsSum) {
          *reinterpret_cast<int4*>(leaves) = *reinterpret_cast<const int4*>(team_.leaves + cell);
        }
#pragma unroll
        for (uint32_t j = 0; j < kCellWords; ++j) {
          const bool is_here = rows[j] >= 0;
          token.count += is_here;
          token.lower += is_here && rows[j] < pairs[i].row;
          if constexpr (kIsSum) {
            if (leaves[j] >= 0) token.remote |= uint64_t{1} << leaves[j];
            token.is_first &= cell + j >= own || leaves[j] != leaf;
          }
        }
      }
      if constexpr (kIsSum) token.remote &= ~kOwnLeaf;
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
    const uint64_t place = block * layout.rounds.tokens + token;
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
    const int32_t leaf_or_none = team_.leaves[i * kWarpSize + LaneId()];
    const bool is_remote =
        leaf_or_none >= 0 && (token.remote >> leaf_or_none & 1) != 0 && token.is_first;
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
    const TreeOrder order(token.remote | (has_own ? kOwnLeaf : 0));
    if (pair.row >= 0) {
      source.from = RowOf(pair);
      source.elem_bytes = sizeof(typename Elem::Storage);
      source.position += token.lower;
      source.ops = kHasRow;
      if (token.lower == 0) source.ops |= kBeginsSum;
      if (token.lower + 1 == token.count) source.ops |= kRounds | kEndsSum | order.OpsAfter(0);
      return source;
    }
    const auto leaf = static_cast<uint32_t>(leaf_or_none);
    const uint32_t before = order.NumBefore(leaf);
    source.position += has_own ? token.count + before - 1 : before;
    source.from = PlaceOfPartial(device_.rank, leaf ^ device_.rank, number);
    source.elem_bytes = sizeof(typename Partial::Storage);
    constexpr bool kIsLikeRow = std::is_same_v<Elem, Partial>;
    source.ops = (kIsLikeRow ? kHasRow : kHasPartial | kEndsSum) | order.OpsAfter(leaf);
    if (order.Begins(leaf)) source.ops |= kBeginsSum;
    return source;
  }

  __device__ void WriteCommands(const Work& work, const Pair (&pairs)[kLanePairs],
                                const Source (&sources)[kLanePairs], uint32_t num_all,
                                bool ends_task) {
    const uint32_t to_bytes = work.kind == WorkKind::kSums ? sizeof(typename Elem::Storage)
                                                           : sizeof(typename Partial::Storage);
    const uint64_t hidden = device_.shape.hidden;
    for (uint64_t first = 0; first < hidden; first += params_.piece_elems) {
      const auto num_elems =
          static_cast<uint32_t>(min(hidden - first, static_cast<uint64_t>(params_.piece_elems)));
      const bool is_last_piece = first + num_elems == hidden;
      Publish(num_all, [&](Batch& batch) {
        if (LaneId() == 0) batch.needs_fence = work.kind == WorkKind::kSums && first == 0;
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
      if (work.kind == WorkKind::kPartials) {
        if (has_rows) ScalarsAt(device_, work.owner, device_.rank, token)[cell.k] = ScalarOf(cell);
        continue;
      }
      const int32_t leaf = team_.leaves[i * kWarpSize + LaneId()];
      float scalar = 0.0f;
      if (leaf == 0) {
        if (has_rows) scalar = ScalarOf(cell);
      } else if (leaf > 0) {
        const uint32_t holder = static_cast<uint32_t>(leaf) ^ device_.rank;
        scalar = ScalarsAt(device_, device_.rank, holder, token)[cell.k];
      }
      params_.pair_scalars_out[token * top_k_ + cell.k] = scalar;
    }
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
  Cell cells_[kLanePairs];
  WorkQueue queue_;
  RingPosition batch_{.parity = 1};
  RingPosition task_{.parity = 1};
};
#endif

}  // namespace jax_ep::gpu::team
