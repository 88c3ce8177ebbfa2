// Byte layout of everything that ranks exchange: one heap per rank, computed from the group's shape
// alone, so that every process (and later every GPU) agrees by construction.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "proxy/abi/channel.h"
#include "proxy/base/doorbell.h"

namespace jax_ep {

enum class ElemType : uint8_t { kF32 = 0, kBf16 = 1, kF16 = 2 };
enum class Layout : uint8_t { kExpertMajor = 0, kExpertBatched = 1, kRankMajor = 2 };
enum class Mode : uint8_t { kHt = 0, kLl = 1 };

constexpr uint64_t ElemBytes(ElemType type) { return type == ElemType::kF32 ? 4 : 2; }

// Static description of a group, equal on all of its ranks.
struct GroupShape {
  uint32_t num_ranks = 1;
  uint32_t node_size = 1;  // divides num_ranks; rank r is in node r / node_size
  uint32_t num_experts = 1;
  uint32_t top_k = 1;
  uint32_t align = 1;        // Config.align
  uint64_t hidden = 1;       // elements of a row
  uint64_t max_tokens = 0;   // T of the largest HT call
  uint64_t ll_tokens = 0;    // T of the largest LL call; 0: no LL areas
  ElemType elem_type = ElemType::kF32;
  bool f32_partials = true;  // Config.partials == "float32"
  bool has_ht = true;        // false: no HT areas
  uint32_t depth = 2;        // Config.max_in_flight: slot sets of every area (epoch modulo depth)

  uint32_t num_nodes() const { return num_ranks / node_size; }
  uint32_t experts_per_rank() const { return num_experts / num_ranks; }
};

// One entry of the agreed order (xla_ffi/order.h): which call the team executes next.
struct OrderEntry {
  uint64_t run_id;
  uint64_t site;
};
inline constexpr uint64_t kOrderLogEntries = 1024;  // power of two

// First bytes of every heap. Zero-initialised memory is a valid start. kernels and xla_ffi use it;
// the proxy gets pointers into it.
struct ControlBlock {
  Doorbell doorbell;  // rung after any change of this heap's flags or control words
  alignas(64) std::atomic<uint64_t> heartbeat;  // bumped by the owner's monitor thread
  std::atomic<uint64_t> failed;                 // 0, or 1 + rank that this process blames (num_ranks: nobody)
  alignas(64) std::atomic<uint64_t> order_count;  // entries announced in `order` (node leaders only)
  alignas(64) OrderEntry order[kOrderLogEntries];
};

// Pointers of the caller's buffers, for node-mates of the same process. Slot = epoch modulo depth.
// Published by a release store of the flag kDispatch / kReduce with the same epoch.
struct PublishedBuffers {
  const std::byte* rows;      // x or y
  const float* weights;       // dispatch: [T, K]; combine: row_weights [R]
  const float* ride;          // combine only
};

}  // namespace jax_ep
