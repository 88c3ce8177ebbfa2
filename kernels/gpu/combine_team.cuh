// What the warps of a team of combine_bulk.cu share, and where it is in shared memory.
#pragma once

#include "kernels/gpu/combine.cuh"

namespace jax_ep::gpu::team {

inline constexpr uint32_t kMaxWarps = 18;
inline constexpr uint32_t kMaxThreads = kMaxWarps * kWarpSize;
inline constexpr uint32_t kRoles = 3;  // warps of a team besides the summers
inline constexpr uint32_t kMaxSummers = 14;
inline constexpr uint32_t kMaxTeams = 4;
inline constexpr uint32_t kLaneElems = 16;  // of a piece, per lane of a summer
inline constexpr uint32_t kWarpElems = kLaneElems * kWarpSize;
inline constexpr uint32_t kMaxSlots = 32;
inline constexpr uint32_t kCommands = 128;
inline constexpr uint32_t kTasks = 32;

// What summers do with a slot, in this order. The number of 16-byte words of the row's type that
// the piece has is in the upper half.
enum SumOps : uint32_t {
  kHasRow = 1u << 0,      // weighted row of this rank
  kHasPartial = 1u << 1,  // partial of a peer, the first and only row of its sum
  kIsZero = 1u << 2,      // the sum of no rows
  kRounds = 1u << 3,      // rounded as if it had left this rank
  kPushes = 1u << 4,      // waits for its right neighbour in the tree
  kIsResult = 1u << 5,    // stored as a result
  kIsPartial = 1u << 6,   // stored as a partial
  kEndsTask = 1u << 7,    // of partials
  kStops = 1u << 8,       // nothing follows
  kNeedsFence = 1u << 9,  // for the issuer: peers wrote what is loaded
  kEndsSum = 1u << 10,    // any of the above but the first two
  kMergesShift = 11,      // how many waiting neighbours are added
  kMergesMask = 7u,       // merges < 8
  kWordsShift = 16,
};

struct alignas(16) Slot {
  std::byte* to;
  float weight;
  uint32_t ops;
};
struct alignas(16) Command {
  const std::byte* from;
  std::byte* to;
  float weight;
  uint32_t ops;
  uint32_t num_bytes;
};
struct Task {
  uint32_t owner;  // kNone: no more
  uint32_t chunk;
};

// Of one team; arrays [kChunkTokens * K] and the ring follow.
struct TeamState {
  uint64_t full[kMaxSlots];
  uint64_t empty[kMaxSlots];
  Slot slots[kMaxSlots];
  Command commands[kCommands];
  Task tasks[kTasks];
  // Counts since the start of the kernel.
  uint32_t commands_written, commands_issued, tasks_written, tasks_sent;
  uint32_t tasks_summed[kMaxSummers];
};

__host__ __device__ inline uint32_t TeamHeadBytes(uint32_t top_k) {
  constexpr uint32_t kArrays = 3;
  return static_cast<uint32_t>(
      AlignUp(sizeof(TeamState) + kArrays * kChunkTokens * top_k * sizeof(int32_t), 128));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr uint32_t kNone = ~0u;

extern __shared__ __align__(128) unsigned char shared_bytes[];

__device__ inline TeamState& TeamOf(const CombineKernelParams& params, uint32_t team) {
  return *reinterpret_cast<TeamState*>(shared_bytes +
                                       static_cast<uint64_t>(team) * params.team_bytes);
}
__device__ inline unsigned char* RingOf(const CombineKernelParams& params, TeamState& team) {
  return reinterpret_cast<unsigned char*>(&team) + TeamHeadBytes(params.device.shape.top_k);
}

// Position in a ring of slots, with the parity of its barriers.
struct RingPosition {
  uint32_t slot = 0;
  uint32_t parity = 0;

  __device__ void Advance(uint32_t num_slots) {
    if (++slot != num_slots) return;
    slot = 0;
    parity ^= 1;
  }
};
#endif

}  // namespace jax_ep::gpu::team
