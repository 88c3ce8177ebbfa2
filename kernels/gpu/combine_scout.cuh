// The warp of a team that finds work and writes commands (combine_bulk.cu).
#pragma once

#include "kernels/gpu/combine_team.cuh"
#include "kernels/gpu/combine_tree.h"
#include "kernels/gpu/elements.cuh"
#include "kernels/gpu/row_index.cuh"

namespace jax_ep::gpu::team {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// The scout's warp. A lane has a pair (or two) of the tokens that it writes commands for, and what
// it knows of the pairs after them is on its way meanwhile.
template <typename Elem, typename Partial>
class Scout {
 public:
  __device__ Scout(const CombineKernelParams& params, uint64_t sequence, TeamState& team)
      : params_(params),
        device_(params.device),
        sequence_(sequence),
        index_(params.device, sequence, params.num_tokens),
        team_(team),
        top_k_(params.device.shape.top_k),
        tokens_per_batch_(min(params.chunk_tokens, kBatchCommands / params.device.shape.top_k)) {}

  __device__ void Run() {
    // The next task of each kind is taken early, so that its number is here in time.
    next_partial_ = Take(&ControlOf(device_)->partials_taken);
    next_sum_ = Take(&ControlOf(device_)->sums_taken);
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
  static constexpr uint32_t kLanePairs = kBatchCommands / kWarpSize;

  enum class Kind : uint32_t { kNone, kPartials, kSums };
  // Tokens of one task whose commands are one batch per piece.
  struct Work {
    Kind kind = Kind::kNone;
    uint32_t owner;
    uint32_t chunk;
    uint32_t first;  // token of the chunk
    uint32_t num_tokens;
    bool begins_task, ends_task;
    bool waits;  // for the peers' partials, before its commands are written
  };
  struct Pair {
    uint64_t entry;
    int32_t place;  // send_slot of a pair of an own token
    int32_t row;
    float weight;
  };
  // Lane t: of token t of the work.
  struct TokenRows {
    uint32_t count;    // rows here
    uint64_t remote;   // other ranks that hold rows of it
    uint32_t begin;    // of its commands
    uint32_t num_all;  // commands of all tokens
  };

  __device__ static uint32_t Take(uint32_t* counter) {  // for lane 0
    return LaneId() == 0 ? atomicAdd(counter, 1u) : 0;
  }

  // Finding work.
  __device__ bool IsReady(uint32_t chunk) const {
    const auto all_here = [&](auto&& load) {
      bool is_here = true;
      for (uint32_t peer = LaneId(); peer < device_.shape.num_ranks; peer += kWarpSize) {
        if (peer == device_.rank) continue;
        is_here &= load(ChunkFlag(device_, peer, chunk)) >> kOperationBits >= sequence_;
      }
      return AllLanes(is_here);
    };
    // Mostly they are not, and an acquire costs the SM its first-level cache.
    if (!all_here([](const uint64_t* flag) { return LoadRelaxedSys(flag); })) return false;
    const bool is_ready = all_here([](const uint64_t* flag) { return LoadAcquireSys(flag); });
    SyncWarp();  // what the lanes acquired
    return is_ready;
  }

  // Nothing: that was all.
  __device__ Work WorkAfter(const Work& work) {
    Work next = work;
    next.begins_task = work.kind == Kind::kNone || work.ends_task;
    if (!next.begins_task) {
      next.first += tokens_per_batch_;
    } else {
      next = NextTask();
      if (next.kind == Kind::kNone) return next;
    }
    const uint64_t first_token = static_cast<uint64_t>(next.chunk) * params_.chunk_tokens;
    const auto chunk_tokens = static_cast<uint32_t>(
        min(static_cast<uint64_t>(params_.chunk_tokens), params_.num_tokens - first_token));
    next.num_tokens = min(tokens_per_batch_, chunk_tokens - next.first);
    next.ends_task = next.first + next.num_tokens == chunk_tokens;
    return next;
  }
  __device__ Work NextTask() {
    const uint32_t num_peers = device_.shape.num_ranks - 1;
    Work next{.begins_task = true};
    next.first = 0;
    const uint32_t chunk = FromLane(next_sum_, 0);
    const uint32_t number = FromLane(next_partial_, 0);
    const bool has_partials = number < num_peers * params_.num_chunks;
    if (chunk < params_.num_chunks && (!has_partials || IsReady(chunk))) {
      next.waits = !has_partials;
      next_sum_ = Take(&ControlOf(device_)->sums_taken);
      next.kind = Kind::kSums;
      next.owner = device_.rank;
      next.chunk = chunk;
    } else if (has_partials) {
      next_partial_ = Take(&ControlOf(device_)->partials_taken);
      next.kind = Kind::kPartials;
      next.chunk = number / num_peers;
      const uint32_t step = (number % num_peers + Scatter(next.chunk)) % num_peers;
      next.owner = (device_.rank + 1 + step) % device_.shape.num_ranks;
    }
    return next;
  }
  // Only work after all partials waits, so there is nothing in hand that a peer may wait for; what
  // is known of its pairs comes meanwhile.
  __device__ bool Wait(const Work& work) const {
    if (!work.waits) return true;
    return WaitChunk(device_, FlagValue(sequence_, Operation::kCombine),
                     [&](uint32_t peer) { return ChunkFlag(device_, peer, work.chunk); });
  }

  // What is known of pairs. Loads only: nothing here waits for them.
  __device__ uint64_t FirstToken(const Work& work) const {
    return static_cast<uint64_t>(work.chunk) * params_.chunk_tokens + work.first;
  }
  __device__ void LoadPlaces(const Work& work, Pair (&pairs)[kLanePairs]) const {
    const uint32_t num_pairs = work.kind == Kind::kNone ? 0 : work.num_tokens * top_k_;
#pragma unroll
    for (uint32_t i = 0; i < kLanePairs; ++i) {
      const uint32_t cell = i * kWarpSize + LaneId();
      pairs[i].entry = 0;
      pairs[i].place = -1;
      if (cell >= num_pairs) continue;
      pairs[i].entry = index_.Entry(work.owner, FirstToken(work), cell);
      if (work.kind == Kind::kSums) {
        pairs[i].place = params_.send_slot[FirstToken(work) * top_k_ + cell];
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
      const int32_t holder = pairs[i].place / params_.rank_rows;
      // Plans come from the caller: a slot beyond the last rank is none.
      const bool is_placed =
          pairs[i].place >= 0 && holder < static_cast<int32_t>(device_.shape.num_ranks);
      team_.rows[cell] = pairs[i].row;
      team_.holders[cell] = is_placed ? holder : -1;
    }
    SyncWarp();
    const TokenRows tokens = CountRows(work);
    if (is_sum ? params_.ride_out != nullptr : params_.ride != nullptr) WriteRides(work, tokens);
    const bool has_rows = is_sum ? params_.out != nullptr : params_.y != nullptr;
    const uint32_t num_commands = has_rows ? tokens.num_all : 0;
    const bool ends_task = !is_sum && work.ends_task;
    if (num_commands > 0) {
      WriteCommands(work, pairs, tokens, ends_task);
    } else if (ends_task) {
      Publish(1, [&](Batch& batch) {
        if (LaneId() == 0) batch.commands[0] = {.ops = kEndsTask | kEndsSum};
      });
    }
  }

  __device__ TokenRows CountRows(const Work& work) const {
    TokenRows token{};
    uint32_t num_commands = 0;
    if (LaneId() < work.num_tokens) {
      for (uint32_t cell = LaneId() * top_k_; cell < (LaneId() + 1) * top_k_; ++cell) {
        token.count += team_.rows[cell] >= 0;
        const int32_t holder = team_.holders[cell];
        if (holder >= 0 && holder != static_cast<int32_t>(device_.rank)) {
          token.remote |= uint64_t{1} << holder;
        }
      }
      num_commands = token.count + static_cast<uint32_t>(__popcll(token.remote));
      // A sum of no rows is one, too.
      if (work.kind == Kind::kSums && num_commands == 0) num_commands = 1;
    }
    const auto inclusive =
        static_cast<uint32_t>(WarpInclusiveSum(static_cast<int32_t>(num_commands)));
    token.begin = inclusive - num_commands;
    token.num_all = FromLane(inclusive, kWarpSize - 1);
    return token;
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
  __device__ Source SourceOf(const Work& work, const Pair& pair, uint32_t cell,
                             const TokenRows& tokens) const {
    const uint32_t t = min(cell / top_k_, work.num_tokens - 1);
    const uint32_t count = FromLane(tokens.count, t);
    const uint64_t remote = FromLane(tokens.remote, t);
    const uint32_t begin = FromLane(tokens.begin, t);
    Source source;
    if (cell >= work.num_tokens * top_k_) return source;
    const uint32_t first = t * top_k_;
    const uint64_t token = FirstToken(work) + t;
    const int32_t row = pair.row;
    const int32_t holder = team_.holders[cell];
    uint32_t lower = 0;
    bool is_first = true;  // of its holder
    for (uint32_t other = first; other < first + top_k_; ++other) {
      const int32_t other_row = team_.rows[other];
      lower += other_row >= 0 && other_row < row;
      is_first &= other >= cell || team_.holders[other] != holder;
    }
    const bool is_remote = holder >= 0 && (remote >> holder & 1) != 0 && is_first;
    const bool is_zero = work.kind == Kind::kSums && count == 0 && remote == 0 && cell == first;
    source.is_one = row >= 0 || is_remote || is_zero;
    if (!source.is_one) return source;
    const GpuHeapLayout& layout = device_.layout;
    const uint32_t num_ranks = device_.shape.num_ranks;
    source.position = begin;
    source.elem_bytes = sizeof(typename Elem::Storage);
    source.from = params_.y + static_cast<uint64_t>(row) * params_.row_bytes;
    source.ops = kHasRow;
    if (work.kind == Kind::kPartials) {
      const uint64_t block = GpuHeapLayout::ReduceBlock(num_ranks, work.owner, device_.rank);
      const uint64_t place = block * device_.shape.max_tokens + token;
      source.to =
          HeapAt<std::byte>(device_, work.owner, layout.reduce_rows + place * layout.reduce_pitch);
      source.position += lower;
      if (lower == 0) source.ops |= kBeginsSum;
      if (lower + 1 == count) source.ops |= kIsPartial | kEndsSum;
      return source;
    }
    source.to = params_.out + token * params_.row_bytes;
    if (is_zero) {
      source.ops = kIsZero | kIsResult | kEndsSum;
      source.elem_bytes = 0;
      return source;
    }
    // Own rows come first, then the partials of other ranks as the tree adds them to what is there.
    const uint64_t own = count > 0 ? uint64_t{1} << device_.rank : 0;
    const TreeOrder order(remote | own, count > 0 ? device_.rank : FirstOf(remote));
    if (row >= 0) {
      source.position += lower;
      if (lower == 0) source.ops |= kBeginsSum;
      if (lower + 1 == count) source.ops |= kRounds | kEndsSum | order.OpsOfFirst();
      return source;
    }
    const auto self = static_cast<uint32_t>(holder);
    const uint32_t before = order.NumBefore(self);
    source.position += count > 0 ? count + before - 1 : before;
    const uint64_t place =
        GpuHeapLayout::ReduceBlock(num_ranks, device_.rank, self) * device_.shape.max_tokens +
        token;
    source.from = OwnHeapAt<std::byte>(device_, layout.reduce_rows + place * layout.reduce_pitch);
    source.elem_bytes = sizeof(typename Partial::Storage);
    constexpr bool kIsLikeRow = std::is_same_v<Elem, Partial>;
    source.ops = (kIsLikeRow ? kHasRow : kHasPartial | kEndsSum) |
                 (before == 0 ? kBeginsSum | order.OpsOfFirst() : order.OpsOf(self));
    return source;
  }

  __device__ void WriteCommands(const Work& work, const Pair (&pairs)[kLanePairs],
                                const TokenRows& tokens, bool ends_task) {
    Source sources[kLanePairs];
#pragma unroll
    for (uint32_t i = 0; i < kLanePairs; ++i) {
      sources[i] = SourceOf(work, pairs[i], i * kWarpSize + LaneId(), tokens);
    }
    const uint32_t to_bytes = work.kind == Kind::kSums ? sizeof(typename Elem::Storage)
                                                       : sizeof(typename Partial::Storage);
    const uint64_t hidden = device_.shape.hidden;
    for (uint64_t first = 0; first < hidden; first += params_.piece_elems) {
      const auto num_elems =
          static_cast<uint32_t>(min(hidden - first, static_cast<uint64_t>(params_.piece_elems)));
      const bool is_last_piece = first + num_elems == hidden;
      Publish(tokens.num_all, [&](Batch& batch) {
        if (LaneId() == 0) batch.needs_fence = work.kind == Kind::kSums && first == 0;
#pragma unroll
        for (uint32_t i = 0; i < kLanePairs; ++i) {
          const Source& source = sources[i];
          if (!source.is_one) continue;
          const bool is_last = source.position + 1 == tokens.num_all;
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

  // Rides.
  __device__ void WriteRides(const Work& work, const TokenRows& tokens) const {
    for (uint32_t first = 0; first < work.num_tokens * top_k_; first += kWarpSize) {
      const uint32_t cell = first + LaneId();
      const uint32_t t = min(cell / top_k_, work.num_tokens - 1);
      const uint32_t count = FromLane(tokens.count, t);
      if (cell >= work.num_tokens * top_k_) continue;
      const uint64_t token = FirstToken(work) + t;
      const uint32_t k = cell - t * top_k_;
      if (work.kind == Kind::kPartials) {
        if (count > 0) *RideAt(work.owner, device_.rank, token, k) = RideOf(t, k);
        continue;
      }
      const int32_t holder = team_.holders[cell];
      float ride = 0.0f;
      if (holder == static_cast<int32_t>(device_.rank)) {
        if (count > 0) ride = RideOf(t, k);
      } else if (holder >= 0) {
        ride = *RideAt(device_.rank, static_cast<uint32_t>(holder), token, k);
      }
      params_.ride_out[token * top_k_ + k] = ride;
    }
  }
  __device__ float* RideAt(uint32_t owner, uint32_t holder, uint64_t token, uint32_t k) const {
    const uint64_t block = GpuHeapLayout::ReduceBlock(device_.shape.num_ranks, owner, holder);
    return HeapAt<float>(device_, owner, device_.layout.reduce_rides) +
           (block * device_.shape.max_tokens + token) * top_k_ + k;
  }
  // Ride of pair k of a token with rows here.
  __device__ float RideOf(uint32_t t, uint32_t k) const {
    const int32_t* rows = team_.rows + t * top_k_;
    if (params_.layout != Layout::kRankMajor) return rows[k] >= 0 ? params_.ride[rows[k]] : 0.0f;
    for (uint32_t other = 0; other < top_k_; ++other) {
      if (rows[other] < 0) continue;
      return params_.ride[static_cast<uint64_t>(rows[other]) * top_k_ + k];
    }
    return 0.0f;
  }

  const CombineKernelParams& params_;
  const DeviceRank& device_;
  uint64_t sequence_;
  RowIndex index_;
  TeamState& team_;
  uint32_t top_k_, tokens_per_batch_;
  uint32_t next_partial_, next_sum_;  // in lane 0
  RingPosition batch_{.parity = 1};
  RingPosition task_{.parity = 1};
};
#endif

}  // namespace jax_ep::gpu::team
