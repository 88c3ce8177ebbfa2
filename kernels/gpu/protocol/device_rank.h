// One rank as its kernels see it: passed to each kernel by value. Plain data for host and device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "kernels/gpu/api.h"
#include "kernels/gpu/protocol/heap_layout.h"

namespace jax_ep::gpu {

struct DeviceNetwork;  // network.h

struct DeviceRank {
  GroupShape shape;      // of the call that is launched: the group's, or a view's
  GpuHeapLayout layout;  // of the group's
  uint32_t rank;
  uint32_t node_begin;  // first rank of this node
  bool debug;
  uint32_t generation;  // RankConfig.generation
  uint64_t active;      // by local rank: those that take part; all bits in a group of several nodes
  uint32_t program;     // of the call that is launched: FingerprintOf
  uint64_t site;        // of the call that is launched: PlanParams.site
  uint64_t timeout_ns;
  RankStatus* status;            // as the device addresses it
  OperationStamp* stamps;        // likewise; null: no trace
  const DeviceNetwork* network;  // in the heap; null in a group of one node
  // Of this node, by local rank. Of one that takes no part this rank's own (SenderTo).
  PeerMemory peers[kMaxNodeRanks];
};

// A call as its peers see it: its operation, and above that a fingerprint of the program that makes
// it. Two ranks whose calls of one number differ in this run different programs.
inline constexpr uint32_t kOperationBits = 4;
inline constexpr uint32_t kProgramBits = 16;
inline constexpr uint32_t kCallBits = kOperationBits + kProgramBits;

constexpr uint32_t CallWord(Operation operation, uint32_t program) {
  return program << kOperationBits | static_cast<uint32_t>(operation);
}
// A call's word below its number, which has 44 bits: years of calls.
constexpr uint64_t FlagValue(uint64_t sequence, Operation operation, uint32_t program) {
  return sequence << kCallBits | CallWord(operation, program);
}

// What is static about a call, in kProgramBits: equal on all ranks that run the same program, else
// almost surely not. `site`: PlanParams.site, or that of the other operations.
constexpr uint32_t FingerprintOf(Operation operation, const GroupShape& shape, uint64_t site,
                                 Mode mode, Layout layout, int64_t num_tokens, int64_t recv_rows) {
  constexpr uint32_t kProgramShift = 32;  // below it is what processes may number differently
  uint64_t hash = site >> kProgramShift;
  for (const uint64_t word :
       {static_cast<uint64_t>(operation), static_cast<uint64_t>(mode),
        static_cast<uint64_t>(layout), static_cast<uint64_t>(num_tokens),
        static_cast<uint64_t>(recv_rows), static_cast<uint64_t>(shape.num_experts),
        static_cast<uint64_t>(shape.top_k), static_cast<uint64_t>(shape.align), shape.hidden}) {
    constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio
    hash = (hash ^ word) * kOdd;
    hash ^= hash >> 32;
  }
  return static_cast<uint32_t>(hash) & ((1u << kProgramBits) - 1);
}

}  // namespace jax_ep::gpu
