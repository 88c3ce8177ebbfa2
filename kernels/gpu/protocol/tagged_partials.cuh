// Partials in wide tagged words: 12 bytes of a partial and the tag of the operation that it belongs
// to (sequence_tag.cuh). As tagged_rows.cuh, but a third more bytes travel where twice as many did,
// which a combine notices (docs/performance.md, "Wide words"). A dispatch does not, and its senders
// would read rows in thirds of a word.
//
//   partial in memory | unit: 16 bytes    | unit              | unit              |
//   its words         | 12 bytes, tag | 12 bytes, tag | 12 bytes, tag | 12 bytes, tag |
//
// Words begin anew with each piece of a partial, so that warps which make pieces need not meet.
#pragma once

#include "kernels/gpu/protocol/push.cuh"
#include "kernels/gpu/protocol/tagged_words.cuh"

namespace jax_ep::gpu {

// Bytes of a piece of a partial, and where they travel.
struct TaggedPiece {
  uint32_t begin, end;  // of the partial, whole units
  uint32_t first_word;

  // Of words of `word_bytes`.
  __device__ TaggedPiece(const Pieces& pieces, uint32_t piece, uint32_t row_words,
                         uint32_t word_bytes)
      : first_word(piece * static_cast<uint32_t>(WideWords(pieces.num_words * word_bytes))) {
    const WordRange range = WordsOf(pieces, piece, row_words);
    begin = range.begin * word_bytes;
    end = range.end * word_bytes;
  }
  __device__ uint32_t num_bytes() const { return end - begin; }
  __device__ uint32_t num_units() const { return num_bytes() / kWireUnitBytes; }
};

// One warp: a piece, which is in shared memory, to its words at `to`.
__device__ inline void SendTagged(const std::byte* piece, uint32_t num_bytes, uint64_t sequence,
                                  uint4* to) {
  constexpr uint32_t kInFlight = 4;  // words of a lane
  constexpr uint32_t kQuarters = kWideDataBytes / sizeof(uint32_t);
  const auto* quarters = reinterpret_cast<const uint32_t*>(piece);
  const uint32_t num_quarters = num_bytes / sizeof(uint32_t);
  const auto num_words = static_cast<uint32_t>(WideWords(num_bytes));
  for (uint32_t first = LaneId(); first < num_words; first += kInFlight * kWarpSize) {
    uint32_t data[kInFlight][kQuarters];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
#pragma unroll
      for (uint32_t q = 0; q < kQuarters; ++q) {
        const uint32_t quarter = (first + i * kWarpSize) * kQuarters + q;
        data[i][q] = quarter < num_quarters ? quarters[quarter] : 0;
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint32_t word = first + i * kWarpSize;
      if (word >= num_words) continue;
      StoreRelaxedSys(to + word, uint4{data[i][0], data[i][1], data[i][2], TagOf(sequence)});
    }
  }
}

// The words of a piece that one peer pushes.
struct WideSource {
  const DeviceRank& device;
  const uint4* words;
  uint64_t sequence;  // of the operation that has pushed them
  uint32_t peer;
  Operation operation;  // that waits

  // One thread: units first + i * stride, those below `end`, once all are here. False: this rank
  // has failed.
  template <uint32_t kUnits>
  __device__ bool Load(uint32_t first, uint32_t stride, uint32_t end,
                       uint4 (&units)[kUnits]) const {
    return LookUntilHere(device, sequence, peer, operation, [&] {
      // The upper half of a word, which is such a word of 8 bytes.
      const uint64_t* missing = nullptr;
#pragma unroll
      for (uint32_t i = 0; i < kUnits; ++i) {
        const uint32_t unit = first + i * stride;
        if (unit >= end) continue;
        // A unit has parts of two words: of the first one what lies behind unit % 3 quarters.
        const uint32_t skipped = unit % 3;
        const uint4* at = words + (unit * 4 - skipped) / 3;
        const uint4 low = LoadRelaxedSys(at);
        const uint4 high = LoadRelaxedSys(at + 1);
        if (low.w != TagOf(sequence)) missing = reinterpret_cast<const uint64_t*>(at) + 1;
        if (high.w != TagOf(sequence)) missing = reinterpret_cast<const uint64_t*>(at) + 3;
        units[i] = skipped == 0   ? uint4{low.x, low.y, low.z, high.x}
                   : skipped == 1 ? uint4{low.y, low.z, high.x, high.y}
                                  : uint4{low.z, high.x, high.y, high.z};
      }
      return missing;
    });
  }
};

}  // namespace jax_ep::gpu
