// The warp of a team that finds work and writes commands (combine_bulk.cu).
#pragma once

#include "kernels/gpu/combine_team.cuh"
#include "kernels/gpu/elements.cuh"
#include "kernels/gpu/row_index.cuh"

namespace jax_ep::gpu::team {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// The scout's warp.
template <typename Elem, typename Partial>
class Scout {
 public:
  __device__ Scout(const CombineKernelParams& params, uint64_t sequence, TeamState& team)
      : params_(params),
        device_(params.device),
        sequence_(sequence),
        index_(params.device, sequence, params.num_tokens),
        team_(team),
        rows_(reinterpret_cast<int32_t*>(&team + 1)),
        weights_(reinterpret_cast<float*>(rows_ + kChunkTokens * params.device.shape.top_k)),
        holders_(rows_ + 2 * kChunkTokens * params.device.shape.top_k) {}

  __device__ void Run() {
    Control* control = ControlOf(device_);
    const uint32_t num_peers = device_.shape.num_ranks - 1;
    const uint32_t num_partials = num_peers * params_.num_chunks;
    // The next task of each kind is taken early, so that its number is here in time.
    uint32_t next_partial = Take(&control->partials_taken);  // in lane 0
    uint32_t next_sum = Take(&control->sums_taken);
    while (true) {
      const uint32_t chunk = FromLane(next_sum, 0);
      const bool has_sum = chunk < params_.num_chunks;
      if (has_sum && IsReady(chunk)) {
        next_sum = Take(&control->sums_taken);
        WriteSums(chunk);
        continue;
      }
      const uint32_t number = FromLane(next_partial, 0);
      if (number < num_partials) {
        next_partial = Take(&control->partials_taken);
        WritePartials(number / num_peers, number % num_peers);
        continue;
      }
      const uint64_t value = FlagValue(sequence_, Operation::kCombine);
      const auto flag_of = [&](uint32_t peer) { return ChunkFlag(device_, peer, chunk); };
      if (!has_sum || !WaitChunk(device_, value, flag_of)) break;
    }
    WriteTask({kNone, 0});
    Write(LaneId() == 0, 0, 1, {.ops = kStops | kEndsSum});
    Publish(++written_);
  }

 private:
  __device__ static uint32_t Take(uint32_t* counter) {
    return LaneId() == 0 ? atomicAdd(counter, 1u) : 0;
  }

  __device__ bool IsReady(uint32_t chunk) const {
    bool is_ready = true;
    for (uint32_t peer = LaneId(); peer < device_.shape.num_ranks; peer += kWarpSize) {
      if (peer == device_.rank) continue;
      is_ready &= LoadAcquireSys(ChunkFlag(device_, peer, chunk)) >> kOperationBits >= sequence_;
    }
    return AllLanes(is_ready);
  }
  // Commands. Room for `count` (<= kCommands / 2) of them; lanes with `mine` write one each.
  __device__ void Write(bool mine, uint32_t position, uint32_t count, const Command& command) {
    while (written_ + count - LoadAcquireBlock(&team_.commands_issued) > kCommands) SleepBriefly();
    if (mine) team_.commands[(written_ + position) % kCommands] = command;
  }
  __device__ void Publish(uint32_t written) {
    SyncWarp();
    if (LaneId() == 0) StoreReleaseBlock(&team_.commands_written, written);
  }
  __device__ void WriteTask(const Task& task) {
    while (tasks_ - LoadAcquireBlock(&team_.tasks_sent) >= kTasks) SleepBriefly();
    SyncWarp();
    if (LaneId() == 0) {
      team_.tasks[tasks_ % kTasks] = task;
      StoreReleaseBlock(&team_.tasks_written, tasks_ + 1);
    }
    ++tasks_;
  }

  // Rows and weights of `count` tokens of `source`.
  __device__ void LoadChunk(uint32_t source, uint64_t first_token, uint32_t num_tokens) {
    const uint32_t num_cells = num_tokens * device_.shape.top_k;
    const bool is_own = source == device_.rank;
    SyncWarp();  // the chunk before has been read
    constexpr uint32_t kInFlight = 4;
    for (uint32_t first = LaneId(); first < num_cells; first += kInFlight * kWarpSize) {
      uint64_t entries[kInFlight];
      int32_t places[kInFlight];
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        const uint32_t cell = first + i * kWarpSize;
        entries[i] = cell < num_cells ? index_.Entry(source, first_token, cell) : 0;
        places[i] = is_own && cell < num_cells
                        ? params_.send_slot[first_token * device_.shape.top_k + cell]
                        : -1;
      }
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        const uint32_t cell = first + i * kWarpSize;
        if (cell >= num_cells) continue;
        const int32_t row = entries[i] == 0 ? kNoRow : index_.RowOf(entries[i]);
        rows_[cell] = row;
        weights_[cell] =
            row >= 0 && params_.row_weights != nullptr ? params_.row_weights[row] : 1.0f;
        // Plans come from the caller: a slot beyond the last rank is none.
        const int32_t holder = places[i] / params_.recv_rows;
        const bool is_placed =
            places[i] >= 0 && holder < static_cast<int32_t>(device_.shape.num_ranks);
        holders_[cell] = is_placed ? holder : -1;
      }
    }
    SyncWarp();
  }

  __device__ uint32_t CountRows(const int32_t* rows) const {
    uint32_t count = 0;
    for (uint32_t first = 0; first < device_.shape.top_k; first += kWarpSize) {
      const uint32_t k = first + LaneId();
      count += CountLanes(Ballot(k < device_.shape.top_k && rows[k] >= 0));
    }
    return count;
  }

  // Ride of pair k of a token with `count` rows here.
  __device__ float RideOf(const int32_t* rows, uint32_t k) const {
    if (params_.layout != Layout::kRankMajor) return rows[k] >= 0 ? params_.ride[rows[k]] : 0.0f;
    for (uint32_t other = 0; other < device_.shape.top_k; ++other) {
      if (rows[other] < 0) continue;
      return params_.ride[static_cast<uint64_t>(rows[other]) * device_.shape.top_k + k];
    }
    return 0.0f;
  }

  // Elements of a piece, and what a command of it has in common.
  struct Piece {
    uint64_t first;
    uint32_t num_elems;

    __device__ uint32_t words() const {
      return num_elems / WordOf<Elem, true>::kElems << kWordsShift;
    }
  };
  __device__ Piece PieceAt(uint64_t first) const {
    const uint64_t rest = device_.shape.hidden - first;
    return {first, static_cast<uint32_t>(rest < params_.piece_elems ? rest : params_.piece_elems)};
  }

  // The local rows of a token, ascending, as one sum; the last one has `last_ops`.
  __device__ void WriteRows(const int32_t* rows, const float* weights, uint32_t count,
                            const Piece& piece, std::byte* to, uint32_t last_ops) {
    const uint32_t top_k = device_.shape.top_k;
    constexpr uint32_t kBytes = sizeof(typename Elem::Storage);
    for (uint32_t first = 0; first < top_k; first += kWarpSize) {
      const uint32_t k = first + LaneId();
      const int32_t row = k < top_k ? rows[k] : kNoRow;
      uint32_t lower = 0;
      for (uint32_t other = 0; other < top_k; ++other) {
        lower += rows[other] >= 0 && rows[other] < row;
      }
      Write(row >= 0, lower, count,
            {.from =
                 params_.y + static_cast<uint64_t>(row) * params_.row_bytes + piece.first * kBytes,
             .to = to,
             .weight = k < top_k ? weights[k] : 0.0f,
             .ops = kHasRow | (lower == count - 1 ? last_ops | kEndsSum : 0) | piece.words(),
             .num_bytes = piece.num_elems * kBytes});
    }
    written_ += count;
  }

  // All tokens of a chunk of `owner` at once, a warp of pairs at a time.
  __device__ void WritePartialsByPair(uint32_t owner, uint64_t first_token, uint32_t num_tokens) {
    const uint32_t top_k = device_.shape.top_k;
    const uint32_t num_cells = num_tokens * top_k;
    const uint32_t token_lane = LaneId() / top_k * top_k;  // of the token's first pair
    const LaneMask lanes_before = (LaneMask{1} << token_lane) - 1;
    const LaneMask token_lanes = (top_k == kWarpSize ? ~LaneMask{0} : (LaneMask{1} << top_k) - 1)
                                 << token_lane;
    const uint64_t block = GpuHeapLayout::ReduceBlock(device_.shape.num_ranks, owner, device_.rank);
    std::byte* area = HeapAt<std::byte>(device_, owner, device_.layout.reduce_rows);
    const uint64_t first_place = block * device_.shape.max_tokens + first_token;
    const uint32_t before = written_;
    constexpr uint32_t kBytes = sizeof(typename Elem::Storage);
    constexpr uint32_t kInFlight = 2;
    for (uint32_t first = LaneId(); first < AlignUp(num_cells, kWarpSize);
         first += kInFlight * kWarpSize) {
      int32_t rows[kInFlight];
      float weights[kInFlight];
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        const uint32_t cell = first + i * kWarpSize;
        const uint64_t entry = cell < num_cells ? index_.Entry(owner, first_token, cell) : 0;
        rows[i] = entry == 0 ? kNoRow : index_.RowOf(entry);
      }
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        weights[i] =
            rows[i] >= 0 && params_.row_weights != nullptr ? params_.row_weights[rows[i]] : 1.0f;
      }
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        const int32_t row = rows[i];
        const LaneMask with_row = Ballot(row >= 0);
        const uint32_t count = CountLanes(with_row);
        if (count == 0) continue;
        uint32_t lower = 0;
        for (uint32_t other = 0; other < top_k; ++other) {
          const int32_t other_row = FromLane(row, token_lane + other);
          lower += other_row >= 0 && other_row < row;
        }
        const bool is_last = lower + 1 == CountLanes(with_row & token_lanes);
        const uint64_t place = first_place + (first + i * kWarpSize) / top_k;
        for (uint64_t begin = 0; begin < device_.shape.hidden; begin += params_.piece_elems) {
          const Piece piece = PieceAt(begin);
          Write(
              row >= 0, CountLanes(with_row & lanes_before) + lower, count,
              {.from = params_.y + static_cast<uint64_t>(row) * params_.row_bytes + begin * kBytes,
               .to = area + place * device_.layout.reduce_pitch +
                     begin * sizeof(typename Partial::Storage),
               .weight = weights[i],
               .ops = kHasRow | (is_last ? kIsPartial | kEndsSum : 0u) | piece.words(),
               .num_bytes = piece.num_elems * kBytes});
          written_ += count;
          Publish(written_ - 1);  // the last one may have to end the task
        }
      }
    }
    EndTask(before);
  }

  // The last command since `before` ends a task.
  __device__ void EndTask(uint32_t before) {
    SyncWarp();
    if (written_ == before) {
      Write(LaneId() == 0, 0, 1, {.ops = kEndsTask | kEndsSum});
      ++written_;
    } else if (LaneId() == 0) {
      team_.commands[(written_ - 1) % kCommands].ops |= kEndsTask | kEndsSum;
    }
    Publish(written_);
  }

  __device__ void WritePartials(uint32_t chunk, uint32_t position) {
    const uint32_t top_k = device_.shape.top_k;
    const uint32_t num_ranks = device_.shape.num_ranks;
    const uint32_t owner =
        (device_.rank + 1 + (position + Scatter(chunk)) % (num_ranks - 1)) % num_ranks;
    const uint64_t first_token = static_cast<uint64_t>(chunk) * kChunkTokens;
    const auto num_tokens = static_cast<uint32_t>(
        min(static_cast<uint64_t>(kChunkTokens), params_.num_tokens - first_token));
    WriteTask({owner, chunk});
    if (params_.y != nullptr && params_.ride == nullptr && kWarpSize % top_k == 0) {
      WritePartialsByPair(owner, first_token, num_tokens);
      return;
    }
    LoadChunk(owner, first_token, num_tokens);
    const uint64_t block = GpuHeapLayout::ReduceBlock(num_ranks, owner, device_.rank);
    const uint32_t before = written_;
    for (uint32_t i = 0; i < num_tokens; ++i) {
      const int32_t* rows = rows_ + i * top_k;
      const uint32_t count = CountRows(rows);
      if (count == 0) continue;
      const uint64_t place = block * device_.shape.max_tokens + first_token + i;
      if (params_.ride != nullptr) {
        float* rides = HeapAt<float>(device_, owner, device_.layout.reduce_rides) + place * top_k;
        for (uint32_t k = LaneId(); k < top_k; k += kWarpSize) rides[k] = RideOf(rows, k);
      }
      if (params_.y == nullptr) continue;
      std::byte* to = HeapAt<std::byte>(
          device_, owner, device_.layout.reduce_rows + place * device_.layout.reduce_pitch);
      for (uint64_t first = 0; first < device_.shape.hidden; first += params_.piece_elems) {
        WriteRows(rows, weights_ + i * top_k, count, PieceAt(first),
                  to + first * sizeof(typename Partial::Storage), kIsPartial);
        Publish(written_ - 1);  // the last one may have to end the task
      }
    }
    EndTask(before);
  }

  __device__ void WriteSums(uint32_t chunk) {
    const uint32_t top_k = device_.shape.top_k;
    const uint64_t first_token = static_cast<uint64_t>(chunk) * kChunkTokens;
    const auto num_tokens = static_cast<uint32_t>(
        min(static_cast<uint64_t>(kChunkTokens), params_.num_tokens - first_token));
    LoadChunk(device_.rank, first_token, num_tokens);
    uint32_t fence = kNeedsFence;
    for (uint32_t i = 0; i < num_tokens; ++i) {
      const uint64_t token = first_token + i;
      const int32_t* rows = rows_ + i * top_k;
      const int32_t* holders = holders_ + i * top_k;
      const uint32_t count = CountRows(rows);
      uint64_t present = 0;  // ranks that hold rows of it
      for (uint32_t k = LaneId(); k < top_k; k += kWarpSize) {
        const int32_t holder = holders[k];
        if (holder >= 0 && holder != static_cast<int32_t>(device_.rank)) {
          present |= uint64_t{1} << holder;
        }
      }
      for (uint32_t mask = kWarpSize / 2; mask > 0; mask /= 2) {
        present |= FromLaneXor(present, mask);
      }
      if (count > 0) present |= uint64_t{1} << device_.rank;
      if (params_.ride_out != nullptr) WriteRides(token, rows, holders, count);
      if (params_.out == nullptr) continue;
      for (uint64_t first = 0; first < device_.shape.hidden; first += params_.piece_elems) {
        fence = WriteSum(token, i, count, present, PieceAt(first), fence);
        Publish(written_);
      }
    }
  }

  __device__ void WriteRides(uint64_t token, const int32_t* rows, const int32_t* holders,
                             uint32_t count) {
    const uint32_t top_k = device_.shape.top_k;
    for (uint32_t k = LaneId(); k < top_k; k += kWarpSize) {
      const int32_t holder = holders[k];
      float ride = 0.0f;
      if (holder == static_cast<int32_t>(device_.rank)) {
        if (count > 0) ride = RideOf(rows, k);
      } else if (holder >= 0) {
        const uint64_t block = GpuHeapLayout::ReduceBlock(device_.shape.num_ranks, device_.rank,
                                                          static_cast<uint32_t>(holder));
        ride = OwnHeapAt<float>(
            device_,
            device_.layout.reduce_rides)[(block * device_.shape.max_tokens + token) * top_k + k];
      }
      params_.ride_out[token * top_k + k] = ride;
    }
  }

  // One piece of a token's sum along the tree over ranks. Returns the fence that is still due.
  __device__ uint32_t WriteSum(uint64_t token, uint32_t i, uint32_t count, uint64_t present,
                               const Piece& piece, uint32_t fence) {
    const uint32_t top_k = device_.shape.top_k;
    std::byte* to =
        params_.out + token * params_.row_bytes + piece.first * sizeof(typename Elem::Storage);
    if (present == 0) {
      Write(LaneId() == 0, 0, 1, {.to = to, .ops = kIsZero | kIsResult | kEndsSum | piece.words()});
      ++written_;
      return fence;
    }
    uint32_t waiting = 0;  // bit l: a sum waits whose right neighbour joins at level l
    while (present != 0) {
      const auto holder = static_cast<uint32_t>(__ffsll(static_cast<long long>(present))) - 1;
      present &= present - 1;
      uint32_t merges = __popc(waiting);
      uint32_t ops = kIsResult;
      if (present != 0) {
        const auto next = static_cast<uint32_t>(__ffsll(static_cast<long long>(present))) - 1;
        const auto level = static_cast<uint32_t>(32 - __clz(static_cast<int>(holder ^ next)));
        const uint32_t lower = (1u << level) - 1;
        merges = __popc(waiting & lower);
        waiting = (waiting & ~lower) | 1u << level;
        ops = kPushes;
      }
      ops |= merges << kMergesShift;
      if (holder == device_.rank) {
        WriteRows(rows_ + i * top_k, weights_ + i * top_k, count, piece, to, ops | kRounds);
        continue;
      }
      constexpr uint32_t kBytes = sizeof(typename Partial::Storage);
      const uint64_t block =
          GpuHeapLayout::ReduceBlock(device_.shape.num_ranks, device_.rank, holder);
      const uint64_t place = block * device_.shape.max_tokens + token;
      Write(LaneId() == 0, 0, 1,
            {.from = OwnHeapAt<std::byte>(device_, device_.layout.reduce_rows +
                                                       place * device_.layout.reduce_pitch) +
                     piece.first * kBytes,
             .to = to,
             .ops = kHasPartial | ops | fence | kEndsSum | piece.words(),
             .num_bytes = piece.num_elems * kBytes});
      ++written_;
      fence = 0;
    }
    return fence;
  }

  const CombineKernelParams& params_;
  const DeviceRank& device_;
  uint64_t sequence_;
  RowIndex index_;
  TeamState& team_;
  int32_t* rows_;     // [kChunkTokens][K]
  float* weights_;    // [kChunkTokens][K]
  int32_t* holders_;  // [kChunkTokens][K], of own tokens: rank that has the pair's row, or -1
  uint32_t written_ = 0;
  uint32_t tasks_ = 0;
};
#endif

}  // namespace jax_ep::gpu::team
