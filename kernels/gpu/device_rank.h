// One rank as its kernels see it: passed to each kernel by value. Plain data for host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gpu/api.h"
#include "kernels/gpu/heap_layout.h"

namespace jax_ep::gpu {

struct DeviceRank {
  GroupShape shape;
  GpuHeapLayout layout;
  uint32_t rank;
  bool debug;
  uint64_t timeout_ns;
  RankStatus* status;  // as the device addresses it
  PeerMemory peers[kMaxNodeRanks];
};

// Bits of a flag below its sequence number: which operation wrote it.
inline constexpr uint32_t kOperationBits = 8;

constexpr uint64_t FlagValue(uint64_t sequence, Operation operation) {
  return (sequence << kOperationBits) | static_cast<uint64_t>(operation);
}

}  // namespace jax_ep::gpu
