// kernels/gpu/network: what an operation adds between nodes, through stages and proxies.
//   In: rows, partials and lists for other nodes. Out: commands to proxies; at the receiver, data.
//   Waits: kernels for the signals that proxies count, and for space in the rings.
//
// What kernels know of the network between nodes: stages, rings, and how far each exchange is.
// Plain data for host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gpu/api.h"
#include "kernels/gpu/network/stage_layout.h"

namespace jax_ep::gpu {

// In the rank's heap, constant since creation.
struct DeviceNetwork {
  NetLayout layout;
  uint32_t num_rings;
  uint32_t ring_slots;  // a power of two
  uint32_t ring_slots_log2;
  bool has_device_stages, has_fast_wire;  // as in NetworkConfig
  // Of node-mates, by local rank, as this device addresses them.
  std::byte* stages[kMaxNodeRanks];
  const uint64_t* signals[kMaxNodeRanks];
  uint64_t* slots[kMaxNetworkRings];        // two words each (proxy/abi/ring.h)
  const uint64_t* tails[kMaxNetworkRings];  // commands that the proxy has taken
};

// The producers' side of a ring, beside them: in host memory each reservation would cross the bus.
struct RingCounters {
  uint64_t head;
  uint64_t cached_tail;
};

// Exchanges of slot sets of one kind with other nodes.
struct NetSets {
  uint64_t started;         // epochs sent
  uint64_t read;            // epochs that this rank has read from its stage
  uint64_t read_told;       // of these, how many it has told the others
  uint64_t read_by_others;  // epochs of which it is known here
  struct {
    uint64_t epoch;  // that used the set last
    uint64_t read;   // its number among those read
  } sets[kMaxDepth];
};

// Records of mode ll to a rank, of tokens side by side: those that are neighbours cross by one
// command. Zero between operations.
inline constexpr uint32_t kGroupTokens = 32;
static_assert(kGroupTokens == kNetChunkTokens);  // what a command may have (checks.cc)
struct RecordGroup {
  uint32_t wanted;  // tokens, as bits, that have one
  uint32_t made;    // shares of its tokens that are; of a dispatch, whose rows are for all ranks at
                    // once, in the group to this rank itself
};
// All tokens of a round to all ranks (LlRoundsOf).
inline constexpr uint32_t kMostRecordGroups = kLlRows / kGroupTokens + kMaxRanks;

// In the rank's heap, zero-initialised, changed by its own kernels alone.
struct NetState {
  uint64_t plans;                   // exchanged
  uint64_t row_rounds, sum_rounds;  // of dispatches and combines that were exchanged
  uint64_t row_slices, sum_slices;  // of those: their signals
  // Of the running kernel that sends slices (send.cuh), by the slice's number in its round: blocks
  // that are through with it. Zero between kernels, also if the rank has failed.
  uint32_t blocks_through[kMostTokenSlices];
  NetSets kinds[kNumSetKinds];
  uint32_t sent[kMaxRanks];  // commands with records of the running operation, by destination
  int32_t whole_epoch;       // from the start to the done of a whole LL call
  RecordGroup groups[kMostRecordGroups];  // [group][N]
  RingCounters rings[kMaxNetworkRings];
};
static_assert(sizeof(NetState) <= kNetStateBytes);
static_assert(sizeof(DeviceNetwork) <= kDeviceNetworkBytes);

}  // namespace jax_ep::gpu
