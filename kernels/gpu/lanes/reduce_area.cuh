// Partials of an HT combine in reduce areas: what combine_rows.cu and network/combine.cu share.
#pragma once

#include "kernels/gpu/ht/combine/combine.cuh"
#include "kernels/gpu/lanes/token_sums.cuh"
#include "kernels/gpu/network/send.cuh"
#include "kernels/gpu/network/steps.cuh"

namespace jax_ep::gpu {

// Blocks of a rank's reduce area: first those of its own tokens, by the mate that holds the rows;
// then, for each rank of its rail in another node, those of that rank's tokens by mate, itself
// included. N - 1 in all.
__device__ inline uint64_t ReduceBlockOf(const DeviceRank& device, uint32_t owner,
                                         uint32_t holder) {
  const GroupShape& shape = device.shape;
  const uint32_t local = holder % shape.node_size;
  if (IsMate(device, owner)) {
    return GpuHeapLayout::ReduceBlock(shape.node_size, owner % shape.node_size, local);
  }
  const uint32_t other =
      OtherNode(shape.num_nodes(), device.node_begin / shape.node_size, owner / shape.node_size);
  return shape.node_size - 1 + other * shape.node_size + local;
}

// Where a round has its places: the first block of its set, and its first token.
struct ReduceRound {
  uint64_t first_block = 0;
  uint64_t begin = 0;
};
__device__ inline ReduceRound ReduceRoundOf(const DeviceRank& device, const TokenSlice& slice) {
  const uint64_t set =
      (NetStateOf(device)->sum_rounds + slice.round()) % device.layout.rounds.num_reduce_sets();
  return {set * (device.shape.num_ranks - 1), slice.round_begin()};
}

// A partial of a token in a block of the reduce area of `rank`.
struct ReducePlace {
  const DeviceRank& device;
  uint32_t rank;
  uint64_t number;  // of all tokens of all blocks

  __device__ ReducePlace(const DeviceRank& own, uint32_t at, const ReduceRound& round,
                         uint64_t block, uint64_t token)
      : device(own),
        rank(at),
        number((round.first_block + block) * own.layout.rounds.tokens + token - round.begin) {}

  __device__ std::byte* Row() const {
    return HeapAt<std::byte>(device, rank,
                             device.layout.reduce_rows + number * device.layout.reduce_pitch);
  }
  __device__ float* Scalars() const {
    return HeapAt<float>(device, rank, device.layout.reduce_scalars) + number * device.shape.top_k;
  }
  // The tag of the step that has written it (StepTag), for owners in other nodes.
  __device__ uint32_t* Presence() const {
    return HeapAt<uint32_t>(device, rank, device.layout.reduce_presence) + number;
  }
};

__device__ inline uint32_t StepTag(const DeviceRank& device, const TokenSlice& slice) {
  return TagOf(StepOf(device, slice));
}

struct SumPlace {
  std::byte* row;
  float* scalars;  // [K], of a node's sum [node_size][K]
};
// Where this node's sum of a token of `owner`, of another one, is in this rank's stage.
__device__ inline SumPlace StagedSumOf(const DeviceRank& device, const TokenSlice& slice,
                                       uint32_t owner, uint64_t token) {
  const GroupShape& shape = device.shape;
  const NetLayout& layout = device.network->layout;
  const uint32_t set = RoundSet(device, NetStateOf(device)->sum_rounds + slice.round());
  const uint32_t other = OtherNode(shape.num_nodes(), NodeOf(device), owner / shape.node_size);
  std::byte* sums = OwnStage(device) + layout.sums_send.At(set, other);
  const uint64_t at = token - slice.round_begin();
  auto* scalars = reinterpret_cast<float*>(sums + layout.sums_scalars);
  return {sums + at * layout.sums_pitch, scalars + at * shape.node_size * shape.top_k};
}
// The partial of a node's only rank is its sum, and is made where that goes.
__device__ inline bool IsNodeSum(const DeviceRank& device, uint32_t owner) {
  return device.shape.node_size == 1 && !IsMate(device, owner);
}

// One thread: this rank has a partial of a token of `owner`, of another node, at `place` if it is
// not the node's sum.
__device__ inline void NoteRemotePartial(const DeviceRank& device, const TokenSlice& slice,
                                         uint32_t owner, uint64_t token, const ReducePlace& place) {
  const GroupShape& shape = device.shape;
  if (IsNodeSum(device, owner)) {
    WantToken(device, slice, token,
              OtherNode(shape.num_nodes(), NodeOf(device), owner / shape.node_size));
  } else {
    *place.Presence() = StepTag(device, slice);
  }
}

template <typename T>
__device__ inline WordRange RowWords(const CombineKernelParams& params) {
  return {0, static_cast<uint32_t>(params.row_bytes / sizeof(typename T::Word))};
}

// One warp: those words of this rank's partial of a token of `owner`, in `slice`, to the owner or
// to the mate on its rail. With the first goes what else there is.
template <typename T>
__device__ void SendPartial(const CombineKernelParams& params, const RowIndex& index,
                            const TokenSlice& slice, const ReduceRound& round, uint32_t owner,
                            uint64_t token, RowList& list, const WordRange& range) {
  const DeviceRank& device = params.device;
  const TokenRows<> rows = FindRows(params, index, owner, token, list);
  if (rows.count == 0) return;
  const uint32_t target = device.node_begin + owner % device.shape.node_size;
  const ReducePlace place(device, target, round, ReduceBlockOf(device, owner, device.rank), token);
  const SumPlace to = IsNodeSum(device, owner) ? StagedSumOf(device, slice, owner, token)
                                               : SumPlace{place.Row(), place.Scalars()};
  if (range.begin == 0) {
    if (!IsMate(device, owner) && LaneId() == 0) {
      NoteRemotePartial(device, slice, owner, token, place);
    }
    if (params.pair_scalars != nullptr) WriteScalars(params, rows, to.scalars);
  }
  if (params.y == nullptr) return;
  WritePartial<T>(params, list, rows.count, range, to.row);
}

// Of a token of this rank, inside its node.
struct MatePartials {
  const DeviceRank& device;
  ReduceRound round = {};

  __device__ RankLeaves Leaves() const { return RankLeaves(device.shape.num_ranks); }
  __device__ uint32_t RankAt(uint32_t holder) const { return holder; }
  __device__ const std::byte* PartialOf(uint32_t rank, uint64_t token) const {
    return PlaceOf(rank, token).Row();
  }
  __device__ const float* ScalarsOf(uint32_t holder, uint64_t token) const {
    return PlaceOf(holder, token).Scalars();
  }

 private:
  // ReduceBlockOf without a division, as sums ask for each of their words.
  __device__ ReducePlace PlaceOf(uint32_t mate, uint64_t token) const {
    const uint32_t above = mate - device.rank - 1;
    const uint32_t block = mate > device.rank ? above : above + device.shape.node_size;
    return {device, device.rank, round, block, token};
  }
};

// One warp: those words of a token of this rank, its partials being here. With the first goes what
// else there is.
template <typename T, typename Partials>
__device__ void FinishToken(const CombineKernelParams& params, const RowIndex& index,
                            uint64_t number, RowList& list, const Partials& partials,
                            const WordRange& range) {
  const uint32_t own = params.device.rank;
  const OwnToken token(params, number, own, FindRows(params, index, own, number, list),
                       [&](uint32_t holder) { return partials.RankAt(holder); });
  if (params.pair_scalars_out != nullptr && range.begin == 0) {
    WriteOwnScalars(params, token,
                    [&](uint32_t holder) { return partials.ScalarsOf(holder, number); });
  }
  if (params.out == nullptr) return;
  WriteOwnSum<T>(params, partials.Leaves(), token, list, range,
                 [&](uint32_t rank) { return partials.PartialOf(rank, number); });
}

}  // namespace jax_ep::gpu
