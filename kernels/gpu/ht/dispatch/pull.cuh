// kernels/gpu/ht/dispatch: rows to the ranks of their experts; backward, scaled, and dot products.
//   In: x and weights of every rank, recv_src. Out: recv_x, recv_weights, recv_dots.
//   Waits: receivers for the sources' entry flags; sources, at the end, for the tail flags of all.
//
// What the kernels that pull rows share: where the sources' rows are, which rows a warp handles,
// the padding, and the end of the operation.
#pragma once

#include <algorithm>

#include "kernels/gpu/ht/dispatch/pull_params.h"
#include "kernels/gpu/launch.h"
#include "kernels/gpu/launch_state.h"
#include "kernels/gpu/network/steps.cuh"
#include "kernels/gpu/protocol/entry.cuh"
#include "kernels/gpu/protocol/row_index.cuh"

namespace jax_ep::gpu {

// What `peer` publishes arrays in. Of a rank of another node that is the stage where its rows
// arrive, that of this node's rank on its rail.
__device__ inline PeerMemory PublishedMemory(const DeviceRank& device, uint32_t peer) {
  if (IsMate(device, peer)) return device.peers[peer - device.node_begin];
  return {.heap = device.network->stages[peer % device.shape.node_size]};
}
// An array that `peer` published for this operation. Of rows that come in rounds only the round's
// are there, so that the array may begin before the memory: the offset is signed.
__device__ inline const std::byte* PublishedArray(const DeviceRank& device, uint32_t peer,
                                                  uint64_t place) {
  const PeerMemory memory = PublishedMemory(device, peer);
  return ((place & 1) != 0 ? memory.arena : memory.heap) + (static_cast<int64_t>(place) >> 1);
}

// All threads of the block, when all have entered. False: a peer names memory that is not mapped.
__device__ inline bool CheckRecords(const PullParams& params) {
  bool is_ok = true;
  const DeviceRank& device = params.device;
  const auto* records = OwnHeapAt<DispatchRecord>(device, device.layout.records);
  for (uint32_t peer = threadIdx.x; peer < device.shape.num_ranks; peer += blockDim.x) {
    if (params.sources == Sources::kMates && !IsMate(device, peer)) continue;
    const PeerMemory memory = PublishedMemory(device, peer);
    const auto check = [&](uint64_t place, uint64_t num_bytes) {
      if ((place & 1) == 0 || num_bytes == 0) return;
      if (memory.arena != nullptr && (place >> 1) + num_bytes <= memory.arena_bytes) return;
      Fail(device, FailureKind::kWrongOrder, Operation::kDispatch, peer, memory.arena_bytes,
           (place >> 1) + num_bytes);
      is_ok = false;
    };
    if (params.recv_x != nullptr && params.x == nullptr) {
      check(records[peer].x, params.num_tokens * params.row_bytes);
    }
    if (params.recv_weights != nullptr) {
      check(records[peer].weights, params.num_tokens * device.shape.top_k * sizeof(float));
    }
  }
  return !SyncBlockAny(!is_ok);
}

// The (source, token) pairs that one warp takes and that have rows here. All pulling warps of the
// grid take from the same ones, since shares of equal size are not equally much work and the last
// warp's end is everyone's. The next pair's index entries and the number of the one after it are
// always on their way.
class ItemCursor {
 public:
  __device__ ItemCursor(const PullParams& params, uint64_t sequence, uint32_t num_warps)
      : index_(params.device, sequence, params.num_tokens),
        num_sources_(params.num_sources()),
        first_source_(params.sources == Sources::kMates ? params.device.node_begin : 0),
        gap_begin_(params.sources == Sources::kOthers ? params.device.node_begin : kNoGap),
        gap_(params.device.shape.node_size),
        own_rank_(params.device.rank),
        top_k_(params.device.shape.top_k),
        end_(num_sources_ * params.slice.end),
        first_taken_(num_sources_ * params.slice.begin + gridDim.x * num_warps),
        position_(num_sources_ * params.slice.begin + blockIdx.x * num_warps + WarpId()),
        taken_(&ControlOf(params.device)->items_taken[params.slice.number_in_round()]) {
    Load();
  }

  // Moves to the next pair with rows and writes them to `rows` [K], in the order of k.
  __device__ bool Next(int32_t* rows) {
    while (position_ < end_) {
      source_ = next_source_;
      token_ = next_token_;
      uint32_t count = 0;
      SyncWarp();
#pragma unroll
      for (uint32_t i = 0; i < kEntriesPerLane; ++i) {
        const uint64_t entry = entries_.of_lane[i];
        const int32_t row = entry == 0 ? kNoRow : index_.RowOf(entry);
        const LaneMask with_row = Ballot(row >= 0);
        if (row >= 0) rows[count + CountLanes(with_row & LanesBelow())] = row;
        count += CountLanes(with_row);
      }
      position_ = first_taken_ + FromLane(number_, 0);
      Load();
      if (count == 0) continue;
      SyncWarp();
      num_rows_ = count;
      return true;
    }
    return false;
  }

  __device__ uint32_t source() const { return source_; }
  __device__ uint64_t token() const { return token_; }
  __device__ uint32_t num_rows() const { return num_rows_; }
  // The next pair that this warp looks at, of num_sources * slice.end; all before it were taken.
  __device__ uint64_t position() const { return position_; }

 private:
  __device__ void Load() {
    if (position_ >= end_) return;
    if (LaneId() == 0) number_ = atomicAdd(taken_, 1u);
    next_token_ = position_ / num_sources_;
    next_source_ =
        first_source_ +
        static_cast<uint32_t>((position_ % num_sources_ + own_rank_ + Scatter(next_token_)) %
                              num_sources_);
    if (next_source_ >= gap_begin_) next_source_ += gap_;
    entries_.Load(index_, next_source_, next_token_, top_k_);
  }

  static constexpr uint32_t kNoGap = ~0u;

  RowIndex index_;
  uint32_t num_sources_;
  uint32_t first_source_, gap_begin_, gap_;  // from one on, `gap_` ranks are left out
  uint32_t own_rank_, top_k_;
  uint64_t end_, first_taken_, position_;
  uint32_t* taken_;
  uint32_t number_ = 0;  // in lane 0: what it took for after the next pair
  TokenEntries entries_;
  uint32_t next_source_ = 0, source_ = 0;
  uint64_t next_token_ = 0, token_ = 0;
  uint32_t num_rows_ = 0;
};

// How far the pull is, as the pulling warps of a block see it, for those that zero padding: zeroes
// that come all at once would hold up the pulled rows.
class Progress {
 public:
  // `positions` [num_warps] is shared and zero.
  __device__ Progress(const PullParams& params, uint32_t* positions, uint32_t num_warps)
      : positions_(positions),
        num_warps_(num_warps),
        begin_(static_cast<uint32_t>(params.num_sources() * params.slice.begin)),
        end_(static_cast<uint32_t>(params.num_sources() * params.slice.end)) {}
  // One lane of a pulling warp.
  __device__ void Set(uint64_t position) const {
    StoreReleaseBlock(positions_ + WarpId(),
                      static_cast<uint32_t>(min(position, static_cast<uint64_t>(end_))));
  }
  __device__ void SetDone() const { Set(end_); }
  // One warp: until a share of number / total has been taken, a little less so that the pulling
  // warps are not waited for in the end.
  __device__ void WaitFor(uint32_t number, uint32_t total) const {
    const uint64_t all = static_cast<uint64_t>(end_ - begin_) * 7 / 8;
    while (true) {
      auto position = static_cast<int32_t>(begin_);
      for (uint32_t warp = LaneId(); warp < num_warps_; warp += kWarpSize) {
        position = max(position, static_cast<int32_t>(LoadAcquireBlock(positions_ + warp)));
      }
      const auto done = static_cast<uint64_t>(WarpMax(position)) - begin_;
      if (done * total >= all * number) return;
      SleepBriefly();
    }
  }

 private:
  uint32_t* positions_;
  uint32_t num_warps_;
  uint32_t begin_, end_;
};

// The last warps of each block, in the first slice of other nodes' if there are any: weights of the
// received rows, and zeroes in what no row fills. This warp is number `warp` of `num_warps`.
// zero_row(row, number, total) is called by the whole warp for each of its rows of padding.
template <typename ZeroRow>
__device__ void FillWeightsAndPadding(const PullParams& params, uint32_t warp, uint32_t num_warps,
                                      ZeroRow&& zero_row) {
  if (!params.slice.IsFirst() || params.sources == Sources::kMates) return;
  const DeviceRank& device = params.device;
  const uint32_t top_k = device.shape.top_k;
  const uint64_t source_codes = device.shape.max_tokens * top_k;
  const uint64_t source_cells = params.num_tokens * top_k;
  const auto* records = OwnHeapAt<DispatchRecord>(device, device.layout.records);
  const auto weight_of = [&](uint32_t source, uint64_t code) {
    const std::byte* weights = PublishedArray(device, source, records[source].weights);
    return reinterpret_cast<const float*>(weights)[code];
  };
  const bool is_rank_major = params.layout == Layout::kRankMajor;
  const bool has_row_weights = params.recv_weights != nullptr && !is_rank_major;
  const uint64_t begin = (static_cast<uint64_t>(blockIdx.x) * num_warps + warp) * kWarpSize;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * num_warps * kWarpSize;
  const auto is_used = [&](int32_t src, uint32_t* source, uint64_t* code) {
    *source = static_cast<uint32_t>(src / static_cast<int64_t>(source_codes));
    *code = static_cast<uint32_t>(src) % source_codes;
    return src >= 0 && *source < device.shape.num_ranks && *code < source_cells;
  };
  int32_t num_used = 0;
  int32_t num_padding = 0;
  constexpr uint32_t kInFlight = 4;
  for (uint64_t first = begin + LaneId(); first < params.recv_rows; first += kInFlight * step) {
    int32_t srcs[kInFlight];
    float weights[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint64_t row = first + i * step;
      srcs[i] = row < params.recv_rows ? params.recv_src[row] : -1;
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      uint32_t source;
      uint64_t code;
      const bool used = is_used(srcs[i], &source, &code);
      num_used += used;
      num_padding += !used && first + i * step < params.recv_rows;
      weights[i] = used && has_row_weights ? weight_of(source, code) : 0.0f;
      if (!used) srcs[i] = -1;
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint64_t row = first + i * step;
      if (row >= params.recv_rows) continue;
      if (has_row_weights) params.recv_weights[row] = weights[i];
      if (srcs[i] < 0 && params.recv_dots != nullptr) params.recv_dots[row] = 0.0f;
    }
  }
  if (params.recv_weights != nullptr && is_rank_major) {
    const uint64_t num_cells = params.recv_rows * top_k;
    // Several at a time: each is a load from its source that waits for a load from here.
    for (uint64_t first = begin + LaneId(); first < num_cells; first += kInFlight * step) {
      bool is_here[kInFlight];
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        const uint64_t cell = first + i * step;
        is_here[i] = cell < num_cells && params.recv_topk_idx[cell] >= 0;
      }
      float weights[kInFlight];
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        const uint64_t cell = first + i * step;
        weights[i] =
            is_here[i] ? weight_of(static_cast<uint32_t>(cell / source_cells), cell % source_cells)
                       : 0.0f;
      }
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        const uint64_t cell = first + i * step;
        if (cell < num_cells) params.recv_weights[cell] = weights[i];
      }
    }
  }
  SyncWarp();
  num_used = WarpSum(num_used);
  if (LaneId() == 0) {
    CountUp(&ControlOf(device)->rows_received, num_used);
  }
  if (params.recv_x == nullptr || !params.zero_padding) return;
  const auto total = static_cast<uint32_t>(WarpSum(num_padding));
  uint32_t number = 0;
  for (uint64_t base = begin; base < params.recv_rows && number < total; base += step) {
    const uint64_t row = base + LaneId();
    uint32_t source;
    uint64_t code;
    LaneMask padding =
        Ballot(row < params.recv_rows && !is_used(params.recv_src[row], &source, &code));
    for (uint32_t lane = 0; padding != 0; ++lane, padding >>= 1) {
      if ((padding & 1) != 0) zero_row(base + lane, number++, total);
    }
  }
}

// Without bulk copies: one warp zeroes one row.
__device__ inline void ZeroRowByWarp(const PullParams& params, uint64_t row) {
  std::byte* to = params.recv_x + row * params.row_bytes;
  if (params.is_vectorised) {
    for (uint64_t i = LaneId(); i < params.row_bytes / sizeof(uint4); i += kWarpSize) {
      reinterpret_cast<uint4*>(to)[i] = uint4{0, 0, 0, 0};
    }
  } else {
    for (uint64_t i = LaneId(); i < params.row_bytes / sizeof(uint16_t); i += kWarpSize) {
      reinterpret_cast<uint16_t*>(to)[i] = 0;
    }
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// One warp zeroes one row from the block's zeroes.
__device__ inline void ZeroRowInBulk(const PullParams& params, const unsigned char* zeroes,
                                     uint64_t row) {
  std::byte* to = params.recv_x + row * params.row_bytes;
  const uint64_t step = static_cast<uint64_t>(kWarpSize) * params.zero_bytes;
  for (uint64_t done = static_cast<uint64_t>(LaneId()) * params.zero_bytes; done < params.row_bytes;
       done += step) {
    const uint64_t rest = params.row_bytes - done;
    BulkStore(to + done, zeroes,
              rest < params.zero_bytes ? static_cast<uint32_t>(rest) : params.zero_bytes);
  }
  BulkCommit();
}
#endif

// All threads of the last block; `shared_flag` is in shared memory. Tells the mates, in the flags
// at `flags_offset`, that this rank has read their arrays, and waits until they have read its own.
// False: this rank has failed, and what it has read may be anything.
//
// A mate that gives up waits for nobody, and XLA reuses its arrays while this rank reads them. Its
// tail flag may have come before that, so it says nothing of it; `peer_failed` does. The mate's
// Fail stores that word here (st.release.sys) in a kernel that ends, with all of its stores
// performed, before its stream can write to the arrays. So if any byte that this rank has read was
// written after the failure, the word was set before. The load below comes after the last of these
// reads: each block's are complete before its arrival, bulk loads by their mbarriers, and
// LastToArrive has acquired all arrivals (acq_rel, gpu). It need not be an acquire, since nothing
// is read because of it; nor does it matter when the tail flags come, and it travels beside the
// first of them.
__device__ inline bool LeaveTogether(const DeviceRank& device, uint64_t flags_offset,
                                     uint64_t value, uint32_t* shared_flag) {
  if (!HasFailed(device)) BlockSignalMates(device, flags_offset, value);
  if (WarpId() == 0) {
    constexpr Operation kOperation = Operation::kDispatch;
    const uint32_t failed = LoadRelaxedSys(OwnHeapAt<uint32_t>(device, device.layout.peer_failed));
    const bool waited =
        WarpWaitFlags(device, flags_offset, device.node_begin, MatesEnd(device), kOperation, value);
    if (LaneId() == 0) {
      if (failed != 0) Fail(device, FailureKind::kPeerFailed, kOperation, failed - 1, value, 0);
      *shared_flag = waited && failed == 0 ? 1 : 0;
    }
  }
  SyncBlock();
  return *shared_flag != 0;
}

// All threads of the block, as the last thing of a kernel; `shared_flag` is in shared memory.
// Sources may reuse their arrays when the last slice's ends, and stages when a round's last one
// does, so all ranks of the node leave these together.
__device__ inline void FinishPull(const PullParams& params, uint64_t sequence, uint64_t num_pulled,
                                  uint32_t* shared_flag) {
  const DeviceRank& device = params.device;
  if (LaneId() == 0 && num_pulled > 0) {
    CountUp(&ControlOf(device)->bytes_pulled, num_pulled * params.wire_bytes);
  }
  const bool ends_round = params.slice.EndsRound() && params.sources != Sources::kMates;
  if (!ends_round || !LastToArrive(device, shared_flag)) return;
  if (!params.slice.IsLast()) {
    const uint64_t left = StepFlag(device, Operation::kDispatch, params.slice);
    LeaveTogether(device, device.layout.left_flags, left, shared_flag);
    return;
  }
  const uint64_t value = FlagValue(sequence, Operation::kDispatch, device.program);
  if (!LeaveTogether(device, device.layout.tail_flags, value, shared_flag)) {
    const uint64_t rows = params.recv_rows;
    const uint64_t cells = params.layout == Layout::kRankMajor ? device.shape.top_k : 1;
    PoisonBytes(params.recv_x, rows * params.row_bytes);
    PoisonBytes(params.recv_weights, rows * cells * sizeof(float));
    PoisonBytes(params.recv_dots, rows * sizeof(float));
    PoisonBytes(params.scales.scales,
                rows * params.format.num_blocks() * params.format.scale_bytes());
  }
  if (threadIdx.x == 0) {
    CountUp(&ControlOf(device)->dispatches, 1);
    ControlOf(device)->records_taken = 0;
    for (uint32_t& taken : ControlOf(device)->items_taken) taken = 0;
    ForgetEntry(device);
    EndOperation(device, sequence);
  }
}

// A kernel that pulls without bulk copies: pull(sequence, num_warps) runs on all warps of a block
// but the last, which fills what no row fills, and returns the remote rows that it read.
template <typename Pull>
__device__ inline void RunPull(const PullParams& params, Pull&& pull) {
  __shared__ uint32_t shared_flag;
  const DeviceRank& device = params.device;
  const uint64_t sequence = SequenceOf(device);
  const uint32_t num_warps = blockDim.x / kWarpSize - 1;
  uint64_t num_pulled = 0;
  if (Enter(device, params.entry, sequence) && CheckRecords(params)) {
    if (WarpId() == num_warps) {
      FillWeightsAndPadding(params, 0, 1,
                            [&](uint64_t row, uint32_t, uint32_t) { ZeroRowByWarp(params, row); });
    } else {
      num_pulled = pull(sequence, num_warps);
    }
  }
  FinishPull(params, sequence, num_pulled, &shared_flag);
}

// Blocks of `num_warps` pulling warps that a call is worth.
inline uint32_t PullBlocks(const PullParams& params, uint32_t num_warps) {
  const uint64_t num_items = params.num_sources() * params.slice.num_tokens();
  // Weights and padding go with the first slice.
  const uint64_t num_filled = params.slice.IsFirst() ? params.recv_rows : 0;
  return std::max(BlocksFor(num_items, num_warps, params.max_blocks),
                  BlocksFor(num_filled, kWarpSize, params.max_blocks));
}

}  // namespace jax_ep::gpu
