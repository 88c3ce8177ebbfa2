// Words that say themselves whether they are here: 32 bits of data below the tag of the operation
// that they belong to. Such a word is stored as a whole, so its writer needs neither
// a release nor a flag behind its data, and one trip between GPUs is enough.
#pragma once

#include "kernels/gpu/protocol/control.cuh"
#include "kernels/gpu/protocol/sequence_tag.cuh"

namespace jax_ep::gpu {

__device__ inline uint64_t Tagged(uint64_t sequence, uint32_t data) {
  return static_cast<uint64_t>(TagOf(sequence)) << kTagBits | data;
}
__device__ inline bool IsOf(uint64_t word, uint64_t sequence) {
  return word >> kTagBits == TagOf(sequence);
}

// One thread, until the word is here. False: this rank has failed.
__device__ __noinline__ inline bool AwaitTagged(const DeviceRank& rank, const uint64_t* word,
                                                uint64_t sequence, uint32_t peer,
                                                Operation operation) {
  return SpinOn(rank, word, peer, operation, FlagValue(sequence, operation, rank.program),
                FailureKind::kTimeout, [&](uint64_t seen, uint64_t) {
                  return IsOf(seen, sequence) ? Seen::kThere : Seen::kTooEarly;
                });
}

// One thread, until look() finds all of its words here; it returns null then, else one that is
// missing. Most are here soon: then a look at all of them is also the load, without another trip.
// False: this rank has failed.
template <typename Look>
__device__ inline bool LookUntilHere(const DeviceRank& rank, uint64_t sequence, uint32_t peer,
                                     Operation operation, Look&& look) {
  constexpr uint32_t kEagerLooks = 64;
  for (uint32_t looks = 1;; ++looks) {
    const uint64_t* missing = look();
    if (missing == nullptr) return true;
    if (looks % kEagerLooks == 0 && !AwaitTagged(rank, missing, sequence, peer, operation)) {
      return false;
    }
  }
}

// One thread. After a failure all bits are set: no expert, not a number.
__device__ __noinline__ inline uint32_t WaitTagged(const DeviceRank& rank, const uint64_t* word,
                                                   uint64_t sequence, uint32_t peer,
                                                   Operation operation) {
  if (!AwaitTagged(rank, word, sequence, peer, operation)) return ~0u;
  return static_cast<uint32_t>(LoadRelaxedSys(word));
}

// One thread. The data of a word that `peer` writes; `loaded` is what was there a moment ago.
__device__ inline uint32_t Untag(const DeviceRank& rank, const uint64_t* word, uint64_t loaded,
                                 uint64_t sequence, uint32_t peer, Operation operation) {
  if (IsOf(loaded, sequence)) return static_cast<uint32_t>(loaded);
  return WaitTagged(rank, word, sequence, peer, operation);
}

// One warp: tags words of its own GPU, for which other blocks may wait.
__device__ inline void WarpTag(uint64_t* to, const void* from, uint32_t count, uint64_t sequence) {
  for (uint32_t i = LaneId(); i < count; i += kWarpSize) {
    StoreRelaxedSys(to + i, Tagged(sequence, static_cast<const uint32_t*>(from)[i]));
  }
}

}  // namespace jax_ep::gpu
