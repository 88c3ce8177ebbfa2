// Rows in tagged words (tagged_words.cuh): a word has 4 bytes of the row, so each says itself
// whether it is here, and no release stands between a row and the flag behind it. A release waits
// until the peer has everything, 2 us of the 12 of a call; twice the bytes cost less than that as
// long as there are few.
//
// All ranks of a group do this for the same calls (TravelsTagged), whatever moves rows otherwise.
#pragma once

#include "kernels/gpu/protocol/push.cuh"
#include "kernels/gpu/protocol/tagged_words.cuh"

namespace jax_ep::gpu {

// Words that a lane stores or loads at once.
inline constexpr uint32_t kTagsAtOnce = 2;
inline constexpr uint32_t kPairBytes = kTagsAtOnce * sizeof(uint32_t);

// Of a whole call of mode ll that carries rows of `row_bytes` and nothing beside them that would
// need a flag. It depends on what is equal on all ranks.
inline bool TravelsTagged(const DeviceRank& rank, uint64_t num_tokens, uint64_t row_bytes) {
  return num_tokens > 0 && num_tokens <= rank.layout.tagged_tokens &&
         row_bytes % kWireUnitBytes == 0;
}
// Bytes of a row that a warp moves.
inline constexpr uint64_t kTaggedPieceBytes = 1024;

// Offset of a row that `source` pushes, in the heap of its receiver.
__device__ inline uint64_t TaggedRow(const TaggedArea& area, uint32_t set, uint32_t source,
                                     uint64_t token) {
  return area.blocks.At(set, source) + token * area.pitch;
}

__device__ inline void StoreTagged(uint64_t* to, uint64_t sequence, uint2 data) {
  StoreRelaxedSys(to, Tagged(sequence, data.x), Tagged(sequence, data.y));
}

// A pair is 8 bytes of a row. Pieces have whole ones, as rows are cut into multiples of 16 bytes.
struct PairRange {
  uint32_t begin, end;
};
template <typename Word>
__device__ inline PairRange PairsOf(WordRange range) {
  if constexpr (sizeof(Word) >= kPairBytes) {
    constexpr uint32_t kPairs = sizeof(Word) / kPairBytes;
    return {range.begin * kPairs, range.end * kPairs};
  } else {
    constexpr uint32_t kWords = kPairBytes / sizeof(Word);
    return {range.begin / kWords, range.end / kWords};
  }
}
// In an array of Words, which may be aligned as one of them and no more.
template <typename Word>
__device__ inline uint2 LoadPair(const std::byte* row, uint32_t pair) {
  if constexpr (sizeof(Word) >= kPairBytes) {
    return reinterpret_cast<const uint2*>(row)[pair];
  } else {
    constexpr uint32_t kWords = kPairBytes / sizeof(Word);
    Word words[kWords];
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
      words[i] = reinterpret_cast<const Word*>(row)[pair * kWords + i];
    }
    uint2 data;
    __builtin_memcpy(&data, words, sizeof(data));
    return data;
  }
}
template <typename Word>
__device__ inline void StorePair(std::byte* row, uint32_t pair, uint2 data) {
  if constexpr (sizeof(Word) >= kPairBytes) {
    reinterpret_cast<uint2*>(row)[pair] = data;
  } else {
    constexpr uint32_t kWords = kPairBytes / sizeof(Word);
    Word words[kWords];
    __builtin_memcpy(words, &data, sizeof(data));
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
      reinterpret_cast<Word*>(row)[pair * kWords + i] = words[i];
    }
  }
}

// The words of a row that one peer pushes.
struct TaggedSource {
  const DeviceRank& device;
  const uint64_t* words;
  uint64_t sequence;  // of the operation that has pushed them
  uint32_t peer;
  Operation operation;  // that waits

  // One thread: pairs of words, number first + i * stride, those below `end`, once all are
  // here. False: this rank has failed.
  template <uint32_t kPairs>
  __device__ bool Load(uint32_t first, uint32_t stride, uint32_t end, uint2 (&data)[kPairs]) const {
    return LookUntilHere(device, sequence, peer, operation, [&] {
      const uint64_t* missing = nullptr;
#pragma unroll
      for (uint32_t i = 0; i < kPairs; ++i) {
        const uint32_t pair = first + i * stride;
        if (pair >= end) continue;
        const uint64_t* at = words + static_cast<uint64_t>(pair) * kTagsAtOnce;
        uint64_t low, high;
        LoadRelaxedSys(at, low, high);
        if (!IsOf(low, sequence)) missing = at;
        if (!IsOf(high, sequence)) missing = at + 1;
        data[i] = {static_cast<uint32_t>(low), static_cast<uint32_t>(high)};
      }
      return missing;
    });
  }
};

}  // namespace jax_ep::gpu
