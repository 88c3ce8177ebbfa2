// Rows in wide tagged words: 12 bytes of the row and the tag of the operation that they belong to
// (sequence_tag.cuh). Such a word is stored as a whole, so each says itself whether it is here, and
// no release stands between a row and the flag behind it. A release waits until the peer has
// everything, 2 us of the 12 of a call; a third more bytes cost less than that as long as there are
// few (docs/performance.md, "Wide words").
//
//   row in memory   | unit: 16 bytes    | unit              | unit              |
//   its words       | 12 bytes, tag | 12 bytes, tag | 12 bytes, tag | 12 bytes, tag |
//
// Words begin anew with each piece of a row, so that warps which make pieces need not meet.
// All ranks of a group do this for the same calls (TravelsTagged), whatever moves rows otherwise.
#pragma once

#include "kernels/gpu/protocol/push.cuh"
#include "kernels/gpu/protocol/tagged_words.cuh"

namespace jax_ep::gpu {

// Of a whole call of mode ll that carries rows of `row_bytes`, as they travel, and nothing beside
// them that would need a flag. It depends on what is equal on all ranks.
inline bool TravelsTagged(const DeviceRank& rank, uint64_t num_tokens, uint64_t row_bytes) {
  return kHasWideWords && num_tokens > 0 && num_tokens <= rank.layout.tagged_tokens &&
         row_bytes % kWireUnitBytes == 0;
}
// Bytes of a row that a warp moves.
inline constexpr uint64_t kTaggedPieceBytes = 1024;

// Bytes of a piece of a row, and where they travel.
struct TaggedPiece {
  uint32_t begin, end;  // of the row, whole units
  uint32_t first_word;

  // Of words of `word_bytes`.
  __device__ TaggedPiece(const Pieces& pieces, uint32_t piece, uint32_t row_words,
                         uint32_t word_bytes)
      : first_word(piece * static_cast<uint32_t>(TaggedWords(pieces.num_words * word_bytes))) {
    const WordRange range = WordsOf(pieces, piece, row_words);
    begin = range.begin * word_bytes;
    end = range.end * word_bytes;
  }
  __device__ uint32_t num_bytes() const { return end - begin; }
  __device__ uint32_t num_units() const { return num_bytes() / kWireUnitBytes; }
};

// Offset of a row that `source` pushes, in the heap of its receiver.
__device__ inline uint64_t TaggedRow(const TaggedArea& area, uint32_t set, uint32_t source,
                                     uint64_t token) {
  return area.blocks.At(set, source) + token * area.pitch;
}

// 4 bytes of an array of Words, which may be aligned as one of them and no more.
template <typename Word>
__device__ inline uint32_t LoadQuarter(const std::byte* bytes, uint32_t number) {
  if constexpr (sizeof(Word) >= sizeof(uint32_t)) {
    return reinterpret_cast<const uint32_t*>(bytes)[number];
  } else {
    const auto* halves = reinterpret_cast<const uint16_t*>(bytes) + 2 * number;
    return halves[0] | static_cast<uint32_t>(halves[1]) << 16;
  }
}
// A unit of such an array.
template <typename Word>
__device__ inline void StoreUnit(std::byte* bytes, uint32_t number, const uint4& unit) {
  constexpr uint32_t kWords = sizeof(uint4) / sizeof(Word);
  Word words[kWords];
  __builtin_memcpy(words, &unit, sizeof(unit));
#pragma unroll
  for (uint32_t i = 0; i < kWords; ++i) {
    reinterpret_cast<Word*>(bytes)[number * kWords + i] = words[i];
  }
}

// One warp: whole units of memory of any kind as words. store(number, word), by one lane, to
// wherever they go; before that loaded(), by all lanes, while what is sent is on its way.
template <typename Word, typename Loaded, typename Store>
__device__ inline void SendTagged(const std::byte* from, uint32_t num_bytes, uint64_t sequence,
                                  Loaded&& loaded, Store&& store) {
  constexpr uint32_t kInFlight = 4;  // words of a lane
  constexpr uint32_t kQuarters = kTaggedDataBytes / sizeof(uint32_t);
  const uint32_t num_quarters = num_bytes / sizeof(uint32_t);
  const auto num_words = static_cast<uint32_t>(TaggedWords(num_bytes));
  for (uint32_t base = 0; base < num_words; base += kInFlight * kWarpSize) {
    const uint32_t first = base + LaneId();
    uint32_t data[kInFlight][kQuarters];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint32_t word = first + i * kWarpSize;
#pragma unroll
      for (uint32_t q = 0; q < kQuarters; ++q) {
        const uint32_t quarter = word * kQuarters + q;
        data[i][q] = quarter < num_quarters ? LoadQuarter<Word>(from, quarter) : 0;
      }
    }
    loaded();
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint32_t word = first + i * kWarpSize;
      if (word < num_words) {
        store(word, uint4{data[i][0], data[i][1], data[i][2], TagOf(sequence)});
      }
    }
  }
}

// A row that one peer pushes, where it arrives.
struct TaggedSource {
  const DeviceRank& device;
  const std::byte* row;
  uint64_t sequence;  // of the operation that has pushed it
  uint32_t peer;
  Operation operation;  // that waits

  // One thread: looks until all is here. False: this rank has failed. look(): a word, or the upper
  // half of a wide one, that is missing, or null. Most are here soon: then a look at all of them is
  // also the load, without another trip.
  template <typename Look>
  __device__ bool Await(Look&& look) const {
    constexpr uint32_t kEagerLooks = 64;
    for (uint32_t looks = 1;; ++looks) {
      const uint64_t* missing = look();
      if (missing == nullptr) return true;
      if (looks % kEagerLooks == 0 && !AwaitTagged(device, missing, sequence, peer, operation))
        return false;
    }
  }

  // One thread: units first + i * stride of a piece, those below `end`, once all are here. False:
  // this rank has failed.
  template <uint32_t kUnits>
  __device__ bool Load(const TaggedPiece& piece, uint32_t first, uint32_t stride, uint32_t end,
                       uint4 (&units)[kUnits]) const {
    const uint4* words = reinterpret_cast<const uint4*>(row) + piece.first_word;
    return Await([&] {
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
