// How an LL dispatch handles rows that travel quantised. Lanes place them: what a warp takes is a
// piece of a row, and what becomes of it goes from registers to all of its places. This rank's own
// rows are quantised where they are placed.
#pragma once

#include "kernels/gpu/device/deliver_records.cuh"
#include "kernels/gpu/lanes/ll_send_records.cuh"
#include "kernels/gpu/ll/dispatch/place.cuh"
#include "kernels/gpu/ll/dispatch/send_records.cuh"

namespace jax_ep::gpu::ll {

// A word is what becomes of a unit in recv_x.
template <typename Delivered>
struct RecordRows : Delivered {
  using typename Delivered::Elem;
  struct Word {
    uint4 words[Delivered::kAreSplit ? 1 : DequantizedUnit<Elem>::kWords];
  };
  static constexpr bool kTakesWholeRows = false;
  static constexpr bool kFitBulkCopies = false;  // of what is placed
  static constexpr bool kFitTaggedWords = true;
  static constexpr uint32_t kWireBytes = sizeof(uint4);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Sender = RecordSender<Elem>;
#endif

  __device__ static void Send(const LlDispatchKernelParams& params, const CallSlot& slot) {
    params.is_tagged ? SendRecords<Elem, true>(params, slot)
                     : SendRecords<Elem, false>(params, slot);
  }
  __device__ static bool PlaceTagged(const LlDispatchKernelParams& params,
                                     const TaggedSource& source, const int32_t* rows,
                                     uint32_t num_rows, WordRange range) {
    TaggedUnits units(params.format, source);
    ForUnits(units, range.begin, range.end, SinkOf(params, rows, num_rows));
    return AllHaveWaited(units.is_ok());
  }
  __device__ static void Place(const LlDispatchKernelParams& params, const std::byte* from,
                               bool is_pushed, const int32_t* rows, uint32_t num_rows,
                               WordRange range) {
    const auto sink = SinkOf(params, rows, num_rows);
    if (is_pushed) {
      ForUnits(RecordUnits(params.format, from), range.begin, range.end, sink);
    } else if (params.is_tagged) {
      ForUnits(TaggedElements<Elem>(params.format, from), range.begin, range.end, sink);
    } else {
      ForUnits(ElementUnits<Elem>(params.format, from), range.begin, range.end, sink);
    }
  }

 private:
  __device__ static auto SinkOf(const LlDispatchKernelParams& params, const int32_t* rows,
                                uint32_t num_rows) {
    return [&params, rows, num_rows](uint32_t unit, uint32_t end, const Unit& in_hand) {
      Delivered::Store(params.format, params.recv_x, params.scales, rows, num_rows, unit, end,
                       in_hand);
    };
  }
};

}  // namespace jax_ep::gpu::ll
