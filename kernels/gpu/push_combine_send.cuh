// The senders of a combine through slot sets (push_combine.cu).
#pragma once

#include "kernels/gpu/push_combine.cuh"

namespace jax_ep::gpu::slots {

template <typename T>
__device__ void SendPiece(const PushCombineParams& params, const CallSlot& slot, uint32_t owner,
                          uint64_t token, uint32_t piece, const LocalRows& local, uint32_t count) {
  const DeviceRank& device = params.device;
  auto* block = HeapAt<std::byte>(device, owner, params.area.blocks.At(slot.set, device.rank));
  if (piece == 0 && params.ride != nullptr) {
    float* rides = reinterpret_cast<float*>(block) + token * device.shape.top_k;
    for (uint32_t k = LaneId(); k < device.shape.top_k; k += kWarpSize) {
      rides[k] = RideOf(params, local, k);
    }
  }
  if (params.y != nullptr) {
    auto* to = reinterpret_cast<typename T::Storage*>(block + params.area.rows +
                                                      token * params.area.pitch);
    const WordRange range = WordsOf(params.pieces, piece, params.row_words);
    for (uint32_t word = range.begin + LaneId(); word < range.end;
         word += T::kSendWords * kWarpSize) {
      float sums[T::kSendWords][T::kElems];
      SumLocalRows<typename T::Elem, typename T::Word>(params, local, count, word, range.end, sums);
#pragma unroll
      for (uint32_t i = 0; i < T::kSendWords; ++i) {
        const uint32_t at = word + i * kWarpSize;
        if (at < range.end) {
          StoreElems<typename T::Partial>(to + static_cast<uint64_t>(at) * T::kElems, sums[i]);
        }
      }
    }
  }
  WarpPublish(device, owner, PieceFlag(params.area, slot.set, device.rank, token, piece),
              FlagValue(slot.started, params.operation));
}

template <typename T>
__device__ void Send(const PushCombineParams& params, const CallSlot& slot, LocalRows& local) {
  const DeviceRank& device = params.device;
  const uint32_t num_ranks = device.shape.num_ranks;
  const uint32_t first_step = params.part == Part::kStart ? 0 : 1;
  const uint32_t num_owners = num_ranks - first_step;
  if (blockIdx.x == 0) {
    BlockSignalPeers(device, params.area.meta_flags.At(slot.set),
                     FlagValue(slot.started, params.operation));
  }
  if (num_owners == 0) return;
  const uint32_t num_items = params.num_tokens * num_owners;
  const RowIndex index(device, SequenceOf(device), params.num_tokens);
  IndexRows(device, index, params.num_tokens, params.recv_src, params.recv_rows,
            [&](uint32_t source, uint32_t token) {
              const uint32_t step = (source + 2 * num_ranks - device.rank - first_step) % num_ranks;
              return step < num_owners &&
                     (token * num_owners + step) % params.num_send_blocks == blockIdx.x;
            });
  SyncBlock();
  const uint32_t pieces = params.pieces.count;
  const uint32_t own_items =
      num_items > blockIdx.x ? (num_items - blockIdx.x - 1) / params.num_send_blocks + 1 : 0;
  for (uint32_t unit = WarpId(); unit < own_items * pieces; unit += kWarps) {
    const uint32_t item = blockIdx.x + unit / pieces * params.num_send_blocks;
    const uint64_t token = item / num_owners;
    const uint32_t owner = (device.rank + first_step + item % num_owners) % num_ranks;
    const uint32_t count = FindRows(params, index, owner, token, local);
    if (count > 0) SendPiece<T>(params, slot, owner, token, unit % pieces, local, count);
  }
}

}  // namespace jax_ep::gpu::slots
