// The adders of a combine through slot sets (slot_combine.cu).
#pragma once

#include "kernels/gpu/device/strides.h"
#include "kernels/gpu/lanes/slot_combine.cuh"

namespace jax_ep::gpu::slot_combine {

// Partials of one token in this rank's set, and its own rows.
struct TokenParts {
  uint64_t has_partial;  // [N] ranks that hold rows of it
  uint32_t num_local;    // rows of `local`, whole calls only
  uint64_t token;
  uint32_t set;
};

template <typename T>
class TokenAdder {
 public:
  __device__ TokenAdder(const SlotCombineParams& params, const TokenParts& parts,
                        const TokenRows& local)
      : params_(params), parts_(parts), local_(local) {}

  // One warp: words of a range of the token's sum.
  __device__ void Add(WordRange range) {
    auto* out = reinterpret_cast<Word*>(params_.out + parts_.token * params_.row_bytes);
    for (uint32_t word = range.begin + LaneId(); word < range.end; word += kWords * kWarpSize) {
      float sums[kWords][kElems];
      AddWords(word, range.end, sums);
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) {
        if (word + i * kWarpSize < range.end) {
          out[word + i * kWarpSize] = Pack<typename T::Elem, Word>(sums[i]);
        }
      }
    }
  }

 private:
  using Word = typename T::Word;
  using Partial = typename T::Partial;
  static constexpr uint32_t kWords = T::kAddWords;
  static constexpr uint32_t kElems = T::kElems;
  static constexpr uint32_t kRanksInFlight = 4;
  using Loaded = float[kWords][kElems];
  // As it is in memory: half the registers where partials have the type of rows.
  using PartialWord = typename T::PartialWord;

  __device__ void AddWords(uint32_t word, uint32_t end, Loaded& sums) {
    const RankLeaves leaves(params_.device.shape);
    Loaded waiting[T::kLevels];
    bool has_sums = false;
    uint32_t first = 0;
    uint32_t is_present = 0;
    for (; first < leaves.count; first += kRanksInFlight) {
      PartialWord loaded[kRanksInFlight][kWords];
#pragma unroll
      for (uint32_t i = 0; i < kRanksInFlight; ++i) {
        Load(leaves.RankOf(first + i), word, end, loaded[i]);
      }
#pragma unroll
      for (uint32_t i = 0; i < kRanksInFlight; ++i) {
        const uint32_t leaf = first + i;
        if (leaf >= leaves.count) continue;
        const uint32_t rank = leaves.RankOf(leaf);
        has_sums = Has(rank);
#pragma unroll
        for (uint32_t j = 0; j < kWords; ++j) Unpack<Partial>(loaded[i][j], sums[j]);
        if (has_sums && IsLocal(rank)) SumLocal(word, end, sums);
        is_present =
            AddToTree<Partial>(leaf, leaves.node_level, waiting, is_present, has_sums, sums);
      }
    }
    if (SumOfTree(leaves.count, waiting, is_present, sums)) return;
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
#pragma unroll
      for (uint32_t e = 0; e < kElems; ++e) sums[i][e] = 0.0f;
    }
  }

  __device__ bool Has(uint32_t rank) const {
    return rank < params_.device.shape.num_ranks && (parts_.has_partial >> rank & 1) != 0;
  }
  __device__ bool IsLocal(uint32_t rank) const {
    return rank == params_.device.rank && params_.part == CallPart::kWhole;
  }

  // The partial of `rank` in the set, if there is one.
  __device__ void Load(uint32_t rank, uint32_t word, uint32_t end, PartialWord (&words)[kWords]) {
    const DeviceRank& device = params_.device;
    if (!Has(rank) || IsLocal(rank)) return;
    const PushArea& area = params_.area;
    const auto* from = OwnHeapAt<PartialWord>(
        device, area.blocks.At(parts_.set, rank) + area.rows + parts_.token * area.pitch);
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
      const uint32_t at = word + i * kWarpSize;
      if (at < end) words[i] = from[at];
    }
  }

  __device__ void SumLocal(uint32_t word, uint32_t end, Loaded& sums) {
    SumTokenRows<typename T::Elem, Word>(params_, local_, parts_.num_local, word, end, sums);
    RoundSums<Partial>(sums);
  }

  const SlotCombineParams& params_;
  const TokenParts& parts_;
  const TokenRows& local_;
};

// The rank that a pair's slot names. Plans come from the caller: a rank beyond the last one is
// none.
__device__ inline uint32_t HolderOf(const SlotCombineParams& params, uint64_t cell) {
  const int32_t slot = params.send_slot[cell];
  return slot >= 0 ? static_cast<uint32_t>(slot) / params.rank_rows : params.device.shape.num_ranks;
}

// One warp: which ranks hold rows of the token. Scalars are written with the first piece.
__device__ inline uint64_t FindHolders(const SlotCombineParams& params, uint64_t token,
                                       uint32_t num_local) {
  const DeviceRank& device = params.device;
  const uint32_t top_k = device.shape.top_k;
  const bool is_whole = params.part == CallPart::kWhole;
  uint64_t holders = is_whole && num_local > 0 ? uint64_t{1} << device.rank : 0;
  for (uint32_t k = LaneId(); k < top_k; k += kWarpSize) {
    const uint32_t holder = HolderOf(params, token * top_k + k);
    if (holder < device.shape.num_ranks && !(is_whole && holder == device.rank)) {
      holders |= uint64_t{1} << holder;
    }
  }
  return WarpOr(holders);
}

__device__ inline void WriteScalars(const SlotCombineParams& params, const TokenParts& parts,
                                    const TokenRows& local) {
  const DeviceRank& device = params.device;
  const uint32_t top_k = device.shape.top_k;
  for (uint32_t k = LaneId(); k < top_k; k += kWarpSize) {
    const uint64_t cell = parts.token * top_k + k;
    const uint32_t holder = HolderOf(params, cell);
    float scalar = 0.0f;
    if (holder < device.shape.num_ranks && (parts.has_partial >> holder & 1) != 0) {
      if (holder == device.rank && params.part == CallPart::kWhole) {
        scalar = ScalarOf(params, local, k);
      } else {
        scalar = OwnHeapAt<float>(device, params.area.blocks.At(parts.set, holder))[cell];
      }
    }
    params.pair_scalars_out[cell] = scalar;
  }
}

template <typename T>
__device__ void Receive(const SlotCombineParams& params, const CallSlot& slot, TokenRows& local,
                        uint32_t* shared_flag) {
  const DeviceRank& device = params.device;
  const uint32_t num_blocks = gridDim.x - params.num_send_blocks;
  const uint32_t block = blockIdx.x - params.num_send_blocks;
  const bool is_whole = params.part == CallPart::kWhole;
  const RowIndex index(device, SequenceOf(device), params.num_tokens);
  if (is_whole) {
    IndexRows(device, index, params.num_tokens, params.recv_src, params.recv_rows,
              [&](uint32_t source, uint32_t token) {
                return source == device.rank && token % num_blocks == block;
              });
  }
  const uint64_t value = StartFlag(slot, params.start_operation);
  if (!BlockWaitPeers(device, params.area.meta_flags.At(slot.set), params.operation, value,
                      shared_flag)) {
    return;
  }
  const uint32_t pieces = params.pieces.count;
  const uint32_t own_tokens = CountStrided(block, num_blocks, params.num_tokens);
  for (uint32_t unit = WarpId(); unit < own_tokens * pieces; unit += kWarps) {
    const uint32_t piece = unit % pieces;
    TokenParts parts{.has_partial = 0,
                     .num_local = 0,
                     .token = block + static_cast<uint64_t>(unit / pieces) * num_blocks,
                     .set = slot.set};
    if (is_whole) parts.num_local = FindRows(params, index, device.rank, parts.token, local);
    parts.has_partial = FindHolders(params, parts.token, parts.num_local);
    bool is_ok = true;
    for (uint32_t peer = LaneId(); peer < device.shape.num_ranks; peer += kWarpSize) {
      if ((parts.has_partial >> peer & 1) == 0 || (is_whole && peer == device.rank)) continue;
      const uint64_t flag = PieceFlag(params.area, slot.set, peer, parts.token, piece);
      is_ok &=
          WaitExactFlag(device, OwnHeapAt<uint64_t>(device, flag), peer, params.operation, value);
    }
    if (!AllHaveWaited(is_ok)) break;
    if (piece == 0 && params.pair_scalars_out != nullptr) WriteScalars(params, parts, local);
    if (params.out == nullptr) continue;
    TokenAdder<T>(params, parts, local).Add(WordsOf(params.pieces, piece, params.row_words));
  }
}

}  // namespace jax_ep::gpu::slot_combine
