// FP8 records in tagged words, in the areas that rows of elements use too (tagged_rows.cuh): words
// of 8 bytes, which a lane makes of the unit that it has in hand. Four for the values of a unit,
// and behind those of all units one for the scale of each block. With blocks of 16 elements or more
// that is never more than the words of the elements.
#pragma once

#include "kernels/gpu/device/record_units.cuh"
#include "kernels/gpu/protocol/tagged_rows.cuh"

namespace jax_ep::gpu {

inline constexpr uint32_t kWordsOfUnit = kUnitElems / sizeof(uint32_t);

__device__ inline uint32_t TaggedScale(const RecordFormat& format, uint32_t unit) {
  return format.num_units * kWordsOfUnit + (unit >> format.block_shift);
}

// A sink's part. One lane: a unit, and the scale of a block with its first one.
__device__ inline void StoreTaggedUnit(const RecordFormat& format, uint64_t* record,
                                       uint64_t sequence, uint32_t unit, const Unit& in_hand) {
  uint64_t* to = record + unit * kWordsOfUnit;
  const uint4& values = in_hand.values;
  StoreRelaxedSys(to, Tagged(sequence, values.x), Tagged(sequence, values.y));
  StoreRelaxedSys(to + 2, Tagged(sequence, values.z), Tagged(sequence, values.w));
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
    const auto* words = reinterpret_cast<const uint64_t*>(source_.row);
    const uint64_t* scale = words + TaggedScale(format_, first);
    const uint64_t loaded = LoadRelaxedSys(scale);
    uint64_t values[kWordsOfUnit];
    is_ok_ &= source_.Await([&] {
      const uint64_t* at = words + first * kWordsOfUnit;
      LoadRelaxedSys(at, values[0], values[1]);
      LoadRelaxedSys(at + 2, values[2], values[3]);
      const uint64_t* missing = nullptr;
#pragma unroll
      for (uint32_t i = 0; i < kWordsOfUnit; ++i) {
        if (!IsOf(values[i], source_.sequence)) missing = at + i;
      }
      return missing;
    });
    unit_ = {
        {static_cast<uint32_t>(values[0]), static_cast<uint32_t>(values[1]),
         static_cast<uint32_t>(values[2]), static_cast<uint32_t>(values[3])},
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
