// What kernels that push rows into peers' slot sets share: pieces of rows and their flags.
#pragma once

#include "kernels/gpu/device/record_format.h"
#include "kernels/gpu/protocol/row_index.cuh"
#include "kernels/gpu/protocol/slot_sets.cuh"

namespace jax_ep::gpu {

// How a row is cut; each piece is pushed by one warp and has a flag of its own.
struct Pieces {
  uint32_t count;      // of a row, 1 for rows without words
  uint32_t num_words;  // of a piece, the last one's may be fewer
};
struct WordRange {
  uint32_t begin, end;
};
__host__ __device__ constexpr WordRange WordsOf(const Pieces& pieces, uint32_t piece,
                                                uint32_t row_words) {
  const uint32_t begin = piece * pieces.num_words;
  const uint32_t end = begin + pieces.num_words;
  return {begin < row_words ? begin : row_words, end < row_words ? end : row_words};
}
// Pieces of about `wanted_bytes`, counted in words of `word_bytes`. Ranks and halves must cut
// alike, so the cut depends on the row alone and not on how arrays are aligned.
inline Pieces CutRow(const GroupShape& shape, uint64_t row_bytes, uint64_t wanted_bytes,
                     uint64_t word_bytes) {
  const uint64_t unit =
      row_bytes % kWireUnitBytes == 0 ? kWireUnitBytes : ElemBytes(shape.elem_type);
  const uint64_t num_units = row_bytes / unit;
  const uint64_t wanted = (row_bytes + wanted_bytes - 1) / wanted_bytes;
  const uint64_t count = wanted < 1 ? 1 : (wanted > kMaxPieces ? kMaxPieces : wanted);
  return {.count = static_cast<uint32_t>(count),
          .num_words = static_cast<uint32_t>((num_units + count - 1) / count * unit / word_bytes)};
}

// The same of a row that travels as a record, in units: `wanted` pieces of whole blocks.
inline Pieces CutUnits(const RecordFormat& format, uint64_t wanted) {
  const uint64_t count = wanted < 1 ? 1 : (wanted > kMaxPieces ? kMaxPieces : wanted);
  const uint64_t units = (format.num_units + count - 1) / count;
  return {.count = static_cast<uint32_t>(count),
          .num_words = static_cast<uint32_t>(AlignUp(units, format.units_per_block))};
}

// Offset of a row in the heap of the rank that `source` pushes it to.
__device__ inline uint64_t PushedRow(const PushArea& area, uint32_t set, uint32_t source,
                                     uint64_t token) {
  return area.blocks.At(set, source) + area.rows + token * area.pitch;
}

// Offset of a flag in the heap of the rank that `source` pushes to.
__device__ inline uint64_t PieceFlag(const PushArea& area, uint32_t set, uint32_t source,
                                     uint64_t token, uint32_t piece) {
  return area.flags.At(set, source) + (token * kMaxPieces + piece) * sizeof(uint64_t);
}

// One warp, after its stores: publishes them with the flag at `offset` in the heap of `owner`.
__device__ inline void WarpPublish(const DeviceRank& device, uint32_t owner, uint64_t offset,
                                   uint64_t value) {
  SyncWarp();
  if (LaneId() == 0) StoreReleaseSys(HeapAt<uint64_t>(device, owner, offset), value);
}

// The pair of a row by its recv_src. False: none; plans come from the caller, what no plan says is
// ignored.
struct RowPair {
  uint32_t source, token, k;
};
__device__ inline bool PairOf(const GroupShape& shape, uint32_t num_tokens, int32_t src,
                              RowPair* pair) {
  if (src < 0) return false;
  const auto source_codes = static_cast<uint32_t>(shape.max_tokens * shape.top_k);
  const uint32_t code = static_cast<uint32_t>(src) % source_codes;
  *pair = {static_cast<uint32_t>(src) / source_codes, code / shape.top_k, code % shape.top_k};
  return pair->source < shape.num_ranks && pair->token < num_tokens;
}

// All threads of the block: puts the rows of the pairs that is_mine(source, token) names into the
// index, which only this block reads, after a SyncBlock; or `num_threads` of a kernel, whose next
// one reads it. Tokens count from the round's first one.
template <typename IsMine>
__device__ void IndexRows(const DeviceRank& device, const RowIndex& index, const LlRound& round,
                          uint32_t num_tokens, const int32_t* recv_src, uint64_t num_rows,
                          IsMine&& is_mine, uint32_t thread = threadIdx.x,
                          uint32_t num_threads = blockDim.x) {
  const auto put = [&](int32_t src, uint64_t row) {
    RowPair pair;
    if (!PairOf(device.shape, round.call_tokens, src, &pair)) return;
    const uint32_t token = pair.token - round.first_token;  // wraps before it
    if (token >= num_tokens || !is_mine(pair.source, token)) return;
    index.Put(pair.source, token, pair.k, static_cast<int32_t>(row));
  };
  constexpr uint32_t kInFlight = 4;
  const bool is_aligned = reinterpret_cast<uintptr_t>(recv_src) % sizeof(int4) == 0;
  const uint64_t num_quads = is_aligned ? num_rows / 4 : 0;
  const auto* quads = reinterpret_cast<const int4*>(recv_src);
  for (uint64_t first = thread; first < num_quads; first += kInFlight * num_threads) {
    int4 values[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint64_t quad = first + i * num_threads;
      values[i] = quad < num_quads ? quads[quad] : int4{-1, -1, -1, -1};
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if ((values[i].x & values[i].y & values[i].z & values[i].w) < 0) continue;  // none is used
      const uint64_t row = (first + i * num_threads) * 4;
      put(values[i].x, row);
      put(values[i].y, row + 1);
      put(values[i].z, row + 2);
      put(values[i].w, row + 3);
    }
  }
  for (uint64_t row = num_quads * 4 + thread; row < num_rows; row += num_threads) {
    put(recv_src[row], row);
  }
}

// The part of a grid that does one thing.
struct BlockShare {
  uint32_t num_blocks;
  uint32_t block;

  __device__ uint32_t num_warps() const { return num_blocks * (blockDim.x / kWarpSize); }
  // Consecutive numbers are in different blocks.
  __device__ uint32_t warp() const { return WarpId() * num_blocks + block; }
};

}  // namespace jax_ep::gpu
