// One rank as its kernels see it: passed to each kernel by value. Plain data for host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gpu/api.h"
#include "kernels/gpu/heap_layout.h"

namespace jax_ep::gpu {

struct DeviceNetwork;  // network.h

struct DeviceRank {
  GroupShape shape;
  GpuHeapLayout layout;
  uint32_t rank;
  uint32_t node_begin;  // first rank of this node
  bool debug;
  uint64_t timeout_ns;
  RankStatus* status;            // as the device addresses it
  const DeviceNetwork* network;  // in the heap; null in a group of one node
  // By rank. Of other nodes' ranks `heap` is the stage where their rows arrive, that of the own
  // node's rank on their rail: only what a DispatchRecord names is read there.
  PeerMemory peers[kMaxNodeRanks];
};

// Bits of a flag below its sequence number: which operation wrote it.
inline constexpr uint32_t kOperationBits = 8;

constexpr uint64_t FlagValue(uint64_t sequence, Operation operation) {
  return (sequence << kOperationBits) | static_cast<uint64_t>(operation);
}

}  // namespace jax_ep::gpu
