// What kernels share that send rows to other nodes, a chunk of kNetChunkTokens per block.
#pragma once

#include "kernels/gpu/device/warp_set.cuh"
#include "kernels/gpu/network/commands.cuh"

namespace jax_ep::gpu {

static_assert(kMaxRanks <= WarpSet::kMost);

// Nodes of a token, as WarpSet::Store has them. In shared memory, one per token; a word
// more, so that lanes that look at many tokens meet all banks.
using StoredSet = uint32_t[kMaxRanks / WarpSet::kBitsPerLane + 1];

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

// One warp: the other nodes that hold rows of a token.
__device__ inline WarpSet RemoteNodesOf(const DeviceRank& device, const int32_t* send_slot,
                                        uint32_t token, uint32_t rank_rows) {
  const GroupShape& shape = device.shape;
  WarpSet nodes;
  for (uint32_t first = 0; first < shape.top_k; first += kWarpSize) {
    const uint32_t k = first + LaneId();
    const int32_t slot =
        k < shape.top_k ? send_slot[static_cast<uint64_t>(token) * shape.top_k + k] : -1;
    const uint32_t rank = RemoteHolderOf(device, slot, rank_rows);
    nodes.Add(rank != kNoRank, rank / shape.node_size);
  }
  return nodes;
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
  if (run.begins) {
    const uint64_t left = ~(uint64_t{bits} >> lane);  // its lowest bit is behind the run
    run.length = static_cast<uint32_t>(__ffsll(static_cast<long long>(left))) - 1;
  }
  return run;
}

// Of a chunk of `count` tokens, those with a bit in `wanted`, or all where that is quicker: a copy
// more takes a copy engine longer than the rows of a gap. Nobody reads what those bring.
__device__ inline uint32_t WithGaps(const DeviceRank& device, uint32_t wanted, uint32_t count) {
  constexpr uint32_t kBits = 32;
  const bool is_dense = 2 * static_cast<uint32_t>(__popc(wanted)) >= count;
  return device.network->has_fast_wire && is_dense ? ~0u >> (kBits - count) : wanted;
}

// One warp: the tokens first + i of the chunk with bit i in `wanted`, each run of them as one
// command like `command`, whose offsets are those of token 0. What a run is widened by, to whole
// units of the wire, are rows of the same chunk. False: this rank has failed.
__device__ inline bool WarpPushRuns(const DeviceRank& device, Operation operation, uint32_t node,
                                    uint32_t wanted, uint64_t first, uint64_t pitch,
                                    Command command) {
  static_assert(kNetChunkTokens <= 32, "tokens are bits");
  const Run run = RunOfLane(wanted);
  if (run.begins) {
    const uint64_t token = first + LaneId();
    const uint64_t begin = token * pitch / kWireUnitBytes * kWireUnitBytes;
    const uint64_t end = AlignUp((token + run.length) * pitch, kWireUnitBytes);
    command.local_offset += begin;
    command.remote_offset += begin;
    command.length_bytes = end - begin;
  }
  return WarpPush(device, operation, node, run.begins, command);
}

}  // namespace jax_ep::gpu
