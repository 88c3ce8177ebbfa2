// What the sources of an LL dispatch say before their rows, in tagged words, and where those are.
#pragma once

#include "kernels/gpu/ll/dispatch/params.cuh"
#include "kernels/gpu/network/slots.cuh"
#include "kernels/gpu/protocol/tagged_words.cuh"

namespace jax_ep::gpu::ll {

// As its receiver sees it. Of a whole call, the own words and rows are where the caller has them.
class SourceWords {
 public:
  struct Rows {
    const std::byte* begin;
    uint64_t pitch;
  };

  __device__ SourceWords(const LlDispatchKernelParams& params, const CallSlot& slot)
      : params_(params), set_(slot.set), started_(slot.started) {}

  // The expert of a pair. In two steps where several are on their way together: LoadExpert, then
  // Expert.
  __device__ uint64_t LoadExpert(uint32_t source, uint32_t cell) const {
    if (IsInPlace(source)) {
      return Tagged(started_, static_cast<uint32_t>(params_.topk_idx[cell]));
    }
    return LoadRelaxedSys(Ids(source) + cell);
  }
  __device__ bool IsHere(uint64_t loaded) const { return IsOf(loaded, started_); }
  __device__ int32_t Expert(uint32_t source, uint32_t cell, uint64_t loaded) const {
    return static_cast<int32_t>(DataOf(source, Ids(source) + cell, loaded));
  }
  __device__ int32_t Expert(uint32_t source, uint32_t cell) const {
    return Expert(source, cell, LoadExpert(source, cell));
  }
  // The weight of a pair, in the same two steps.
  __device__ uint64_t LoadWeight(uint32_t source, uint32_t cell) const {
    if (IsInPlace(source)) return Tagged(started_, __float_as_uint(params_.weights[cell]));
    return LoadRelaxedSys(Weights(source) + cell);
  }
  __device__ float Weight(uint32_t source, uint32_t cell, uint64_t loaded) const {
    return __uint_as_float(DataOf(source, Weights(source) + cell, loaded));
  }
  __device__ uint32_t HeaderWord(uint32_t source, uint32_t number) const {
    const uint64_t* word = At(source, 0) + number;
    return DataOf(source, word, LoadRelaxedSys(word));
  }
  __device__ Rows RowsOf(uint32_t source) const {
    if (IsInPlace(source)) return {params_.x, params_.x_bytes};
    if (AreReadInStage(params_.device, source)) {
      const SentRecords records = RecordsOf(params_.device, kKind, set_, source);
      return {records.begin, records.pitch};
    }
    const PushArea& area = params_.device.layout.ll_dispatch;
    return {OwnHeapAt<std::byte>(params_.device, area.blocks.At(set_, source)) + area.rows,
            area.pitch};
  }

 private:
  __device__ bool IsInPlace(uint32_t source) const {
    return params_.part == CallPart::kWhole && source == params_.device.rank;
  }
  __device__ const uint64_t* At(uint32_t source, uint64_t offset) const {
    const PushArea& area = params_.device.layout.ll_dispatch;
    return OwnHeapAt<uint64_t>(params_.device, area.blocks.At(set_, source) + offset);
  }
  __device__ const uint64_t* Ids(uint32_t source) const {
    return At(source, params_.device.layout.push_ids);
  }
  __device__ const uint64_t* Weights(uint32_t source) const {
    return At(source, params_.device.layout.push_weights);
  }
  __device__ uint32_t DataOf(uint32_t source, const uint64_t* word, uint64_t loaded) const {
    return Untag(params_.device, word, loaded, started_, source, params_.operation);
  }

  const LlDispatchKernelParams& params_;
  uint32_t set_;
  uint64_t started_;
};

// The sender's side, in items that a warp each takes: the header, then ids and weights by the
// kWordsOfItem.
inline constexpr uint32_t kLaneWords = 4;
inline constexpr uint32_t kWordsOfItem = kLaneWords * kWarpSize;

__host__ __device__ inline uint32_t WordItemsOfArray(const LlDispatchKernelParams& params) {
  const uint32_t cells = params.plan.num_tokens * params.device.shape.top_k;
  return (cells + kWordsOfItem - 1) / kWordsOfItem;
}
__host__ __device__ inline uint32_t NumWordItems(const LlDispatchKernelParams& params) {
  const uint32_t arrays = (params.is_routed ? 1 : 0) + (params.has_weights ? 1 : 0);
  return 1 + arrays * WordItemsOfArray(params);
}

// One warp. For each node-mate but, in a whole call, this rank.
template <typename Function>
__device__ void ForDestinations(const LlDispatchKernelParams& params, Function&& function) {
  const DeviceRank& device = params.device;
  for (uint32_t step = params.part == CallPart::kStart ? 0 : 1; step < device.shape.node_size;
       ++step) {
    const uint32_t own = device.rank - device.node_begin;
    function(device.node_begin + (own + step) % device.shape.node_size);
  }
}

// One warp.
__device__ inline void SendWords(const LlDispatchKernelParams& params, const CallSlot& slot,
                                 uint32_t item) {
  const DeviceRank& device = params.device;
  const auto block = [&](uint32_t dest) {
    return device.layout.ll_dispatch.blocks.At(slot.set, SenderTo(device, dest));
  };
  if (item == 0) {
    const PushHeader header = HeaderOf(params, params.operation, slot.program);
    uint32_t word = 0;
#pragma unroll
    for (uint32_t i = 0; i < PushHeader::kNumWords; ++i) {
      if (i == LaneId()) word = static_cast<uint32_t>(header.words[i]);
    }
    ForDestinations(params, [&](uint32_t dest) {
      if (LaneId() >= PushHeader::kNumWords) return;
      StoreRelaxedSys(HeapAt<uint64_t>(device, dest, block(dest)) + LaneId(),
                      Tagged(slot.started, word));
    });
    return;
  }
  const uint32_t items = WordItemsOfArray(params);
  const bool is_ids = params.is_routed && item - 1 < items;
  const uint32_t cells = params.plan.num_tokens * device.shape.top_k;
  const uint32_t first = (item - 1) % items * kWordsOfItem + LaneId();
  const auto* from = is_ids ? reinterpret_cast<const uint32_t*>(params.topk_idx)
                            : reinterpret_cast<const uint32_t*>(params.weights);
  uint32_t words[kLaneWords];
#pragma unroll
  for (uint32_t i = 0; i < kLaneWords; ++i) {
    const uint32_t cell = first + i * kWarpSize;
    words[i] = cell < cells ? from[cell] : 0;
  }
  const uint64_t array = is_ids ? device.layout.push_ids : device.layout.push_weights;
  ForDestinations(params, [&](uint32_t dest) {
    auto* to = HeapAt<uint64_t>(device, dest, block(dest) + array);
    constexpr uint32_t kNoExpert = ~0u;
    const bool is_active = IsActive(device, dest);
#pragma unroll
    for (uint32_t i = 0; i < kLaneWords; ++i) {
      const uint32_t cell = first + i * kWarpSize;
      const uint32_t word = is_active ? words[i] : kNoExpert;
      if (cell < cells) StoreRelaxedSys(to + cell, Tagged(slot.started, word));
    }
  });
}

}  // namespace jax_ep::gpu::ll
