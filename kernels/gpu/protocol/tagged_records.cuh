// FP8 records in tagged words (tagged_rows.cuh), in the areas that rows of elements use too: four
// words for the values of a unit, and behind those of all units one for the scale of each block.
// With blocks of 16 elements or more that is never more than the words of the elements.
#pragma once

#include "kernels/gpu/device/record_units.cuh"
#include "kernels/gpu/protocol/tagged_rows.cuh"

namespace jax_ep::gpu {

inline constexpr uint32_t kPairsOfUnit = kUnitElems / kPairBytes;

__device__ inline uint32_t TaggedScale(const RecordFormat& format, uint32_t unit) {
  return format.num_units * kPairsOfUnit * kTagsAtOnce + (unit >> format.block_shift);
}

// A sink's part. One lane: a unit, and the scale of a block with its first one.
__device__ inline void StoreTaggedUnit(const RecordFormat& format, uint64_t* record,
                                       uint64_t sequence, uint32_t unit, const Unit& in_hand) {
  uint64_t* to = record + unit * kPairsOfUnit * kTagsAtOnce;
  StoreTagged(to, sequence, {in_hand.values.x, in_hand.values.y});
  StoreTagged(to + kTagsAtOnce, sequence, {in_hand.values.z, in_hand.values.w});
  if (LeadsBlock(format, unit)) {
    StoreRelaxedSys(record + TaggedScale(format, unit), Tagged(sequence, in_hand.scale));
  }
}

// The record that a peer pushes, a source: its units once they are here.
class TaggedUnits {
 public:
  static constexpr uint32_t kCount = 1;  // pieces have about a unit for each lane

  __device__ TaggedUnits(const RecordFormat& format, const TaggedSource& source)
      : format_(format), source_(source) {}

  __device__ void Load(uint32_t first, uint32_t end) {
    if (first >= end) return;
    const uint64_t* scale = source_.words + TaggedScale(format_, first);
    const uint64_t loaded = LoadRelaxedSys(scale);
    const uint32_t pair = first * kPairsOfUnit;
    uint2 values[kPairsOfUnit];
    is_ok_ &= source_.Load(pair, 1, pair + kPairsOfUnit, values);
    unit_ = {
        {values[0].x, values[0].y, values[1].x, values[1].y},
        Untag(source_.device, scale, loaded, source_.sequence, source_.peer, source_.operation)};
  }
  template <typename Sink>
  __device__ void Give(uint32_t first, uint32_t end, Sink&& sink) const {
    sink(first, end, unit_);
  }
  // Of this lane. False: this rank has failed, and what was given is no record. (A scale that does
  // not come fails the rank, too; the units behind it say so.)
  __device__ bool is_ok() const { return is_ok_; }

 private:
  const RecordFormat& format_;
  const TaggedSource& source_;
  Unit unit_ = {};
  bool is_ok_ = true;
};

}  // namespace jax_ep::gpu
