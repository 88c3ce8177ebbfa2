// The senders of an LL dispatch (ll_dispatch.cu) whose lanes load and store the rows.
#pragma once

#include "kernels/gpu/ll/dispatch/destinations.cuh"
#include "kernels/gpu/ll/dispatch/source_words.cuh"
#include "kernels/gpu/protocol/tagged_rows.cuh"

namespace jax_ep::gpu::ll {

// One warp, after its stores: the flags of a piece at all destinations of its token, in one
// release, which waits until the peers have got the stores.
__device__ inline void PublishPiece(const LlDispatchKernelParams& params, const CallSlot& slot,
                                    uint64_t dests, uint32_t token, uint32_t piece) {
  const DeviceRank& device = params.device;
  const uint64_t flag = PieceFlag(device.layout.ll_dispatch, slot.set, device.rank, token, piece);
  SyncWarp();
  for (uint32_t local = LaneId(); local < device.shape.node_size; local += kWarpSize) {
    if ((dests >> local & 1) == 0) continue;
    StoreReleaseSys(HeapAt<uint64_t>(device, device.node_begin + local, flag),
                    StartFlag(slot, params.operation));
  }
}

// A warp takes a piece of a row to all destinations of its token in this node.
template <typename Word>
__device__ void SendRows(const LlDispatchKernelParams& params, const CallSlot& slot) {
  const DeviceRank& device = params.device;
  const uint32_t node_size = device.shape.node_size;
  const uint32_t first_step = params.part == CallPart::kStart ? 0 : 1;
  const uint32_t num_dests = node_size - first_step;
  if (num_dests == 0) return;
  const BlockShare share{.num_blocks = params.num_send_blocks, .block = blockIdx.x};
  const uint32_t own = device.rank - device.node_begin;
  const auto local_of = [&](uint32_t step) { return (own + first_step + step) % node_size; };
  const uint32_t word_items = NumWordItems(params);
  const uint32_t num_pieces = params.has_rows ? params.plan.num_tokens * params.pieces.count : 0;
  for (uint32_t item = share.warp(); item < word_items + num_pieces; item += share.num_warps()) {
    if (item < word_items) {
      SendWords(params, slot, item);
      continue;
    }
    const uint32_t token = (item - word_items) / params.pieces.count;
    const uint32_t piece = (item - word_items) % params.pieces.count;
    const WordRange range = WordsOf(params.pieces, piece, params.row_words);
    const uint64_t place = PushedRow(device.layout.ll_dispatch, slot.set, device.rank, token);
    const Destinations destinations(params, token);
    LaneWords<Word> words;
    const std::byte* from = params.x + token * params.x_bytes;
    words.Load(from, range.begin, range.end);
    const uint64_t dests = destinations.Mask();
    for (uint32_t first = range.begin;; words.Load(from, first, range.end)) {
      for (uint32_t step = 0; step < num_dests; ++step) {
        // Tokens begin with different destinations, so that links are used alike.
        const uint32_t local = local_of((step + token) % num_dests);
        if ((dests >> local & 1) == 0) continue;
        words.Store(HeapAt<std::byte>(device, device.node_begin + local, place), first, range.end);
      }
      first += words.kStep;
      if (first >= range.end) break;
    }
    PublishPiece(params, slot, dests, token, piece);
  }
}

// The same in tagged words, which need no flags: by the halves of 16-byte words.
template <typename Word>
__device__ void SendTaggedRows(const LlDispatchKernelParams& params, const CallSlot& slot) {
  const DeviceRank& device = params.device;
  const uint32_t num_others = device.shape.num_ranks - 1;
  const BlockShare share{.num_blocks = params.num_send_blocks, .block = blockIdx.x};
  const uint32_t word_items = NumWordItems(params);
  const uint32_t num_pieces = params.plan.num_tokens * params.pieces.count;
  for (uint32_t item = share.warp(); item < word_items + num_pieces; item += share.num_warps()) {
    if (item < word_items) {
      SendWords(params, slot, item);
      continue;
    }
    const uint32_t token = (item - word_items) / params.pieces.count;
    const uint32_t piece = (item - word_items) % params.pieces.count;
    const PairRange range = PairsOf<Word>(WordsOf(params.pieces, piece, params.row_words));
    const uint64_t place =
        TaggedRow(device.layout.ll_dispatch_tagged, slot.set, device.rank, token);
    const Destinations destinations(params, token);
    const std::byte* from = params.x + token * params.x_bytes;
    constexpr uint32_t kInFlight = 4;  // pairs of a lane
    uint2 data[kInFlight];
    const auto load = [&](uint32_t first) {
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) {
        const uint32_t pair = first + i * kWarpSize;
        if (pair < range.end) data[i] = LoadPair<Word>(from, pair);
      }
    };
    load(range.begin + LaneId());
    const uint64_t dests = destinations.Mask();
    for (uint32_t first = range.begin + LaneId(); first < range.end;) {
      for (uint32_t step = 0; step < num_others; ++step) {
        const uint32_t dest =
            (device.rank + 1 + (step + token) % num_others) % device.shape.num_ranks;
        if ((dests >> dest & 1) == 0) continue;
        auto* to = HeapAt<uint64_t>(device, dest, place);
#pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) {
          const uint32_t pair = first + i * kWarpSize;
          if (pair < range.end) {
            StoreTagged(to + static_cast<uint64_t>(pair) * kTagsAtOnce, slot.started, data[i]);
          }
        }
      }
      first += kInFlight * kWarpSize;
      load(first);
    }
  }
}

}  // namespace jax_ep::gpu::ll
