// Partials of an HT combine, made and added by lanes that load and store: what combine_rows.cu and
// network/combine.cu share.
#pragma once

#include "kernels/gpu/device/elements.cuh"
#include "kernels/gpu/ht/combine/combine.cuh"
#include "kernels/gpu/network/network.h"
#include "kernels/gpu/sums/rank_tree.cuh"
#include "kernels/gpu/sums/token_rows.cuh"

namespace jax_ep::gpu {

// Blocks of a rank's reduce area: first those of its own tokens, by the mate that holds the rows;
// then, for each rank of its rail in another node, those of that rank's tokens by mate, itself
// included. N - 1 in all.
__device__ inline uint64_t ReduceBlockOf(const DeviceRank& device, uint32_t owner,
                                         uint32_t holder) {
  const GroupShape& shape = device.shape;
  const uint32_t local = holder % shape.node_size;
  if (IsMate(device, owner)) {
    return (local + shape.node_size - owner % shape.node_size - 1) % shape.node_size;
  }
  const uint32_t other =
      OtherNode(shape.num_nodes(), device.node_begin / shape.node_size, owner / shape.node_size);
  return shape.node_size - 1 + other * shape.node_size + local;
}
// Where this rank's partials for `owner` go: to the owner, or to the mate on the owner's rail.
struct ReduceTarget {
  uint32_t rank;
  uint64_t block;
};
__device__ inline ReduceTarget ReduceTargetOf(const DeviceRank& device, uint32_t owner) {
  const uint32_t rank = device.node_begin + owner % device.shape.node_size;
  return {rank, ReduceBlockOf(device, owner, device.rank)};
}

// Sums of other nodes in this rank's stage.
struct NodeSums {
  const std::byte* stage = nullptr;
  HeapArea area = {};
  uint32_t parity = 0;
  uint64_t pitch = 0;
  uint64_t scalars = 0;

  // Of the node of `rank`.
  __device__ const std::byte* RowsOf(const DeviceRank& device, uint32_t rank) const {
    const GroupShape& shape = device.shape;
    const uint32_t own_node = device.node_begin / shape.node_size;
    return stage + area.At(parity, OtherNode(shape.num_nodes(), own_node, rank / shape.node_size));
  }
  __device__ float ScalarOf(const DeviceRank& device, uint32_t holder, uint64_t token,
                            uint32_t k) const {
    const auto* all = reinterpret_cast<const float*>(RowsOf(device, holder) + scalars);
    const uint64_t local = token * device.shape.node_size + holder % device.shape.node_size;
    return all[local * device.shape.top_k + k];
  }
};

// Weighted sum of the local rows, words word + i * kWarpSize for i < kWords.
template <typename Elem, typename Word, uint32_t kWords, uint32_t kElems>
__device__ inline void SumTokenRows(const CombineKernelParams& params, const TokenRows& local,
                                    uint32_t count, uint64_t word, uint64_t num_words,
                                    float (&sums)[kWords][kElems]) {
  for (uint32_t i = 0; i < count; ++i) {
    const auto* row = reinterpret_cast<const Word*>(
        params.y + static_cast<uint64_t>(local.rows[i]) * params.row_bytes);
    Word words[kWords];
#pragma unroll
    for (uint32_t j = 0; j < kWords; ++j) {
      if (word + j * kWarpSize < num_words) words[j] = row[word + j * kWarpSize];
    }
    AddRow<Elem>(words, local.weights[i], i == 0, sums);
  }
}

// kLevels: of the tree over ranks, num_ranks < 2^kLevels.
template <typename Elem, typename Partial, bool kIsVectorised, uint32_t kLevels>
struct Sums {
  using Word = typename WordOf<Elem, kIsVectorised>::Type;
  static constexpr uint32_t kElems = WordOf<Elem, kIsVectorised>::kElems;
  using PartialType = Partial;
  using PartialStorage = typename Partial::Storage;
  static constexpr uint32_t kTreeLevels = kLevels;

  // One warp: this rank's partial of a token of `owner`.
  __device__ static void SendPartial(const CombineKernelParams& params, const RowIndex& index,
                                     uint32_t owner, uint64_t token, TokenRows& local) {
    const DeviceRank& device = params.device;
    const uint32_t count = FindRows(params, index, owner, token, local);
    if (count == 0) return;
    const ReduceTarget target = ReduceTargetOf(device, owner);
    const uint64_t place = target.block * device.shape.max_tokens + token;
    if (!IsMate(device, owner) && LaneId() == 0) {
      HeapAt<uint32_t>(device, target.rank, device.layout.reduce_presence)[place] =
          TagOf(SequenceOf(device));
    }
    if (params.pair_scalars != nullptr) {
      float* scalars = HeapAt<float>(device, target.rank, device.layout.reduce_scalars) +
                       place * device.shape.top_k;
      for (uint32_t k = LaneId(); k < device.shape.top_k; k += kWarpSize) {
        scalars[k] = ScalarOf(params, local, k);
      }
    }
    if (params.y == nullptr) return;
    auto* to = HeapAt<PartialStorage>(
        device, target.rank, device.layout.reduce_rows + place * device.layout.reduce_pitch);
    constexpr uint32_t kWords = 4;
    const uint64_t num_words = params.row_bytes / sizeof(Word);
    for (uint64_t word = LaneId(); word < num_words; word += kWords * kWarpSize) {
      float sums[kWords][kElems];
      SumTokenRows<Elem, Word>(params, local, count, word, num_words, sums);
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) {
        const uint64_t index_of_word = word + i * kWarpSize;
        if (index_of_word < num_words) StoreElems<Partial>(to + index_of_word * kElems, sums[i]);
      }
    }
  }

  // One warp: the sum of a token of this rank. `has_partial` [N]: ranks that hold rows of it; for
  // another node its first rank, if any does.
  __device__ static void SumToken(const CombineKernelParams& params, uint64_t token,
                                  const TokenRows& local, uint32_t num_local, uint64_t has_partial,
                                  const NodeSums& node_sums) {
    const RankLeaves leaves(params.device.shape);
    constexpr uint32_t kWords = kLevels <= 3 ? 2 : 1;
    const uint64_t num_words = params.row_bytes / sizeof(Word);
    auto* out = reinterpret_cast<Word*>(params.out + token * params.row_bytes);
    for (uint64_t word = LaneId(); word < num_words; word += kWords * kWarpSize) {
      float waiting[kLevels][kWords][kElems];
      uint32_t is_present = 0;
      float sums[kWords][kElems];
      bool has_sums = false;
      for (uint32_t leaf = 0; leaf < leaves.count; ++leaf) {
        const uint32_t rank = leaves.RankOf(leaf);
        has_sums = rank != RankLeaves::kNone && (has_partial >> rank & 1) != 0;
        if (has_sums && rank == params.device.rank) {
          SumTokenRows<Elem, Word>(params, local, num_local, word, num_words, sums);
          RoundSums<Partial>(sums);
        } else if (has_sums) {
          LoadPartial(PartialOf(params.device, rank, token, node_sums), word, num_words, sums);
        }
        is_present =
            AddToTree<Partial>(leaf, leaves.node_level, waiting, is_present, has_sums, sums);
      }
      has_sums = SumOfTree(leaves.count, waiting, is_present, sums);
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) {
        if (!has_sums) {
#pragma unroll
          for (uint32_t e = 0; e < kElems; ++e) sums[i][e] = 0.0f;
        }
        if (word + i * kWarpSize < num_words) {
          out[word + i * kWarpSize] = Pack<Elem, Word>(sums[i]);
        }
      }
    }
  }

  template <uint32_t kWords>
  __device__ static void LoadPartial(const std::byte* partial, uint64_t word, uint64_t num_words,
                                     float (&sums)[kWords][kElems]) {
    const auto* from = reinterpret_cast<const PartialStorage*>(partial);
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
      const uint64_t index_of_word = word + i * kWarpSize;
      if (index_of_word < num_words) LoadElems<Partial>(from + index_of_word * kElems, sums[i]);
    }
  }

 private:
  // What `rank`, not this one, has sent of a token of this rank.
  __device__ static const std::byte* PartialOf(const DeviceRank& device, uint32_t rank,
                                               uint64_t token, const NodeSums& node_sums) {
    if (!IsMate(device, rank)) return node_sums.RowsOf(device, rank) + token * node_sums.pitch;
    const uint64_t block = ReduceBlockOf(device, device.rank, rank);
    return OwnHeapAt<std::byte>(
        device, device.layout.reduce_rows +
                    (block * device.shape.max_tokens + token) * device.layout.reduce_pitch);
  }
};

// One warp: everything about a token of this rank, its partials being here.
template <typename S>
__device__ void FinishToken(const CombineKernelParams& params, const RowIndex& index,
                            uint64_t token, TokenRows& local, const NodeSums& node_sums = {}) {
  const DeviceRank& device = params.device;
  const uint32_t top_k = device.shape.top_k;
  const uint32_t num_ranks = device.shape.num_ranks;
  const uint32_t num_local = FindRows(params, index, device.rank, token, local);
  uint64_t has_partial = num_local > 0 ? uint64_t{1} << device.rank : 0;
  for (uint32_t first = 0; first < top_k; first += kWarpSize) {
    const uint32_t k = first + LaneId();
    const uint64_t cell = token * top_k + k;
    const int32_t slot = k < top_k ? params.send_slot[cell] : -1;
    // Plans come from the caller: a slot beyond the last rank is none.
    const uint32_t holder = slot >= 0 ? static_cast<uint32_t>(slot / params.rank_rows) : num_ranks;
    const bool is_placed = holder < num_ranks;
    const bool is_mate = is_placed && IsMate(device, holder);
    if (is_placed && holder != device.rank) {
      const uint32_t first_of_node = holder / device.shape.node_size * device.shape.node_size;
      has_partial |= uint64_t{1} << (is_mate ? holder : first_of_node);
    }
    if (params.pair_scalars_out == nullptr || k >= top_k) continue;
    float scalar = 0.0f;
    if (is_placed && holder == device.rank) {
      if (num_local > 0) scalar = ScalarOf(params, local, k);
    } else if (is_placed && !is_mate) {
      scalar = node_sums.ScalarOf(device, holder, token, k);
    } else if (is_placed) {
      const uint64_t block = ReduceBlockOf(device, device.rank, holder);
      scalar = OwnHeapAt<float>(
          device,
          device.layout.reduce_scalars)[(block * device.shape.max_tokens + token) * top_k + k];
    }
    params.pair_scalars_out[cell] = scalar;
  }
  if (params.out == nullptr) return;
  S::SumToken(params, token, local, num_local, WarpOr(has_partial), node_sums);
}

}  // namespace jax_ep::gpu
