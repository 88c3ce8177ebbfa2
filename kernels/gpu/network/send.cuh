// What kernels share that send rows to other nodes: those of a chunk of kNetChunkTokens by as few
// commands as possible.
#pragma once

#include "kernels/gpu/network/commands.cuh"
#include "kernels/gpu/network/token_slices.h"

namespace jax_ep::gpu {

// The rank of another node that holds the row of a pair, or kNoRank. `rank_rows`: slots of one
// rank.
inline constexpr uint32_t kNoRank = ~0u;
__device__ inline uint32_t RemoteHolderOf(const DeviceRank& device, int32_t slot,
                                          uint32_t rank_rows) {
  const uint32_t rank = static_cast<uint32_t>(slot) / rank_rows;
  // Plans come from the caller: a slot beyond the last rank is none.
  const bool is_remote = slot >= 0 && rank < device.shape.num_ranks && !IsMate(device, rank);
  return is_remote ? rank : kNoRank;
}

// Which tokens of a chunk another node wants, as bits, from the warps that put their rows into the
// stage to the block that pushes the commands. Zero between the kernels that send.
__device__ inline uint32_t* WantedOf(const DeviceRank& device, const TokenSlice& slice,
                                     uint64_t token, uint32_t other) {
  const uint64_t chunk = (token - slice.round_begin()) / kNetChunkTokens;
  return OwnHeapAt<uint32_t>(device, device.layout.net_wanted) +
         chunk * (device.shape.num_nodes() - 1) + other;
}
// One thread.
__device__ inline void WantToken(const DeviceRank& device, const TokenSlice& slice, uint64_t token,
                                 uint32_t other) {
  atomicOr(WantedOf(device, slice, token, other), 1u << token % kNetChunkTokens);
}

// One warp copies a row, 16 bytes a lane where both ends allow it.
__device__ inline void WarpCopyBytes(std::byte* to, const std::byte* from, uint64_t num_bytes) {
  const auto ends = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  const uint64_t num_words = ends % sizeof(uint4) == 0 ? num_bytes / sizeof(uint4) : 0;
  constexpr uint32_t kInFlight = 8;
  for (uint64_t first = LaneId(); first < num_words; first += kInFlight * kWarpSize) {
    uint4 words[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (first + i * kWarpSize < num_words) {
        words[i] = reinterpret_cast<const uint4*>(from)[first + i * kWarpSize];
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (first + i * kWarpSize < num_words) {
        reinterpret_cast<uint4*>(to)[first + i * kWarpSize] = words[i];
      }
    }
  }
  // Rows are made of elements of at least two bytes.
  for (uint64_t i = num_words * (sizeof(uint4) / 2) + LaneId(); i < num_bytes / 2; i += kWarpSize) {
    reinterpret_cast<uint16_t*>(to)[i] = reinterpret_cast<const uint16_t*>(from)[i];
  }
}

// How many bits of a word are set from bit `at` on, without a gap.
__device__ inline uint32_t RunLength(uint32_t bits, uint32_t at) {
  const uint64_t rest = ~(uint64_t{bits} >> at);  // its lowest bit is behind the run
  return static_cast<uint32_t>(__ffsll(static_cast<long long>(rest))) - 1;
}
// Of bits in a word, by lane: where a run of them begins, and how many it has.
struct Run {
  bool begins;
  uint32_t length;
};
__device__ inline Run RunOfLane(uint32_t bits) {
  constexpr uint32_t kBits = 32;
  const uint32_t lane = LaneId();
  Run run{.begins = lane < kBits && (bits >> lane & 1) != 0 &&
                    (lane == 0 || (bits >> (lane - 1) & 1) == 0),
          .length = 0};
  if (run.begins) run.length = RunLength(bits, lane);
  return run;
}

// Of a chunk of `count` tokens, those with a bit in `wanted`, or all where that is quicker: a copy
// more takes a copy engine longer than the rows of a gap. Nobody reads what those bring.
__device__ inline uint32_t WithGaps(const DeviceRank& device, uint32_t wanted, uint32_t count) {
  constexpr uint32_t kBits = 32;
  const bool is_dense = 2 * static_cast<uint32_t>(__popc(wanted)) >= count;
  return device.network->has_fast_wire && is_dense ? ~0u >> (kBits - count) : wanted;
}

// Tokens that are neighbours in a chunk, counted from the round's first one.
struct TokenRun {
  uint64_t begin;
  uint32_t length;

  // Their command: like `command`, whose offsets are those of token 0. What it is widened by, to
  // whole units of the wire, are rows of the same chunk.
  __device__ Command Of(Command command, uint64_t pitch) const {
    const uint64_t first = begin * pitch / kWireUnitBytes * kWireUnitBytes;
    command.local_offset += first;
    command.remote_offset += first;
    command.length_bytes = AlignUp((begin + length) * pitch, kWireUnitBytes) - first;
    return command;
  }
};

// All threads of the last block of a kernel that wanted tokens. push(node, has, run), by one warp:
// the runs that another node wants, one of each lane with `has`; false: this rank has failed. As
// many as possible at once, since each push waits for its stores to the host. False: this rank has
// failed, and no signal may follow.
template <typename Push>
__device__ bool PushRuns(const DeviceRank& device, const TokenSlice& slice, Push&& push) {
  static_assert(kNetChunkTokens <= 32, "tokens are bits");
  const uint32_t num_nodes = device.shape.num_nodes();
  const auto num_chunks = static_cast<uint32_t>(slice.num_chunks());
  bool is_ok = true;
  for (uint32_t other = WarpId(); other + 1 < num_nodes; other += blockDim.x / kWarpSize) {
    const uint32_t node = NodeOfOther(num_nodes, NodeOf(device), other);
    for (uint32_t before = 0; before < num_chunks; before += kWarpSize) {
      const uint32_t chunk = before + LaneId();
      const uint64_t first = slice.begin + chunk * kNetChunkTokens;
      uint32_t left =
          chunk < num_chunks ? atomicExch(WantedOf(device, slice, first, other), 0u) : 0;
      if (left != 0) left = WithGaps(device, left, NumChunkTokens(slice, first));
      while (is_ok && Ballot(left != 0) != 0) {
        TokenRun run{.begin = 0, .length = 0};
        const bool has = left != 0;
        if (has) {
          const uint32_t bit = static_cast<uint32_t>(__ffs(static_cast<int>(left))) - 1;
          run.begin = first - slice.round_begin() + bit;
          run.length = RunLength(left, bit);
          left &= ~static_cast<uint32_t>(((uint64_t{1} << run.length) - 1) << bit);
        }
        is_ok = push(node, has, run);
      }
    }
  }
  return !SyncBlockAny(!is_ok);  // the signal comes after all of them
}

}  // namespace jax_ep::gpu
