// The senders of an LL dispatch whose rows travel quantised, without bulk copies: a warp quantises
// a piece of a row and stores it at all destinations of its token; in tagged words, without a flag.
#pragma once

#include "kernels/gpu/device/element_units.cuh"
#include "kernels/gpu/lanes/ll_send.cuh"
#include "kernels/gpu/protocol/tagged_records.cuh"

namespace jax_ep::gpu::ll {

// A piece that travels tagged has about a unit for each lane.
template <typename Elem>
using TaggedElements = ElementUnits<Elem, 1>;

template <typename Elem, bool kIsTagged>
__device__ void SendRecords(const LlDispatchKernelParams& params, const CallSlot& slot) {
  const DeviceRank& device = params.device;
  const uint32_t num_ranks = device.shape.num_ranks;
  if (num_ranks == 1) return;
  const BlockShare share{.num_blocks = params.num_send_blocks, .block = blockIdx.x};
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
    const uint64_t place =
        kIsTagged ? TaggedRow(device.layout.ll_dispatch_tagged, slot.set, device.rank, token)
                  : PushedRow(device.layout.ll_dispatch, slot.set, device.rank, token);
    const uint64_t dests = Destinations(params, token).Mask() & ~(uint64_t{1} << device.rank);
    using Elements = std::conditional_t<kIsTagged, TaggedElements<Elem>, ElementUnits<Elem>>;
    ForUnits(Elements(params.format, params.x + token * params.x_bytes), range.begin, range.end,
             [&](uint32_t unit, uint32_t end, const Unit& in_hand) {
               if (unit >= end) return;
               for (uint32_t step = 1; step < num_ranks; ++step) {
                 const uint32_t dest = (device.rank + step) % num_ranks;
                 if ((dests >> dest & 1) == 0) continue;
                 if constexpr (kIsTagged) {
                   StoreTaggedUnit(params.format, HeapAt<uint64_t>(device, dest, place),
                                   slot.started, unit, in_hand);
                 } else {
                   StoreInRecord(params.format, HeapAt<std::byte>(device, dest, place), unit,
                                 in_hand);
                 }
               }
             });
    if constexpr (!kIsTagged) PublishPiece(params, slot, dests, token, piece);
  }
}

}  // namespace jax_ep::gpu::ll
