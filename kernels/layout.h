// Byte layout of everything that ranks exchange: one heap per rank, computed from the group's shape
// alone, so that every process (and later every GPU) agrees by construction.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/rounds.h"
#include "proxy/abi/activity.h"
#include "proxy/abi/channel.h"
#include "proxy/base/doorbell.h"

namespace jax_ep {

enum class ElemType : uint8_t { kF32 = 0, kBf16 = 1, kF16 = 2 };
enum class Layout : uint8_t { kExpertMajor = 0, kExpertBatched = 1, kRankMajor = 2 };
enum class Mode : uint8_t { kHt = 0, kLl = 1 };

constexpr uint64_t ElemBytes(ElemType type) { return type == ElemType::kF32 ? 4 : 2; }

// What the scales of FP8 rows are (docs/semantics.md, "FP8 rows").
enum class Fp8Scale : int { kF32 = 0, kUe8m0 = 1 };
constexpr uint64_t ScaleBytes(Fp8Scale scale) { return scale == Fp8Scale::kF32 ? 4 : 1; }

// Static description of a group, equal on all of its ranks. A call may have fewer experts or expert
// slots, shorter rows or another align than the heap was laid out for (Group.view).
struct GroupShape {
  uint32_t num_ranks = 1;
  uint32_t node_size = 1;  // divides num_ranks; rank r is in node r / node_size
  uint32_t num_experts = 1;
  uint32_t top_k = 1;
  uint32_t align = 1;       // Config.align
  uint64_t hidden = 1;      // elements of a row
  uint64_t max_tokens = 0;  // T of the largest HT call
  uint64_t ll_tokens = 0;   // T of the largest LL call; 0: no LL areas
  ElemType elem_type = ElemType::kF32;
  bool f32_partials = true;   // Config.partials == "float32"
  bool has_ht = true;         // false: no HT areas
  uint32_t depth = 2;         // Config.max_in_flight: slot sets of rows and sums
  uint64_t round_tokens = 0;  // for tests: no round has more tokens; 0: as many as fit

  constexpr uint32_t num_nodes() const { return num_ranks / node_size; }
  constexpr uint32_t experts_per_rank() const { return num_experts / num_ranks; }
  // In whose heap arrives, flag and bytes, what `source` sends to `rank` on CPUs. In mode ht a rank
  // sends routing and rows to another node once, to its rail mate there, for all of the node.
  constexpr uint32_t receiver_of(Channel channel, uint32_t rank, uint32_t source) const {
    const uint32_t node = rank / node_size;
    const bool is_for_node = channel == Channel::kPlan || channel == Channel::kDispatch;
    if (!is_for_node || source / node_size == node) return rank;
    return node * node_size + source % node_size;
  }
  bool operator==(const GroupShape&) const = default;
};

// Rounds of mode ll.
constexpr Rounds LlRoundsOf(const GroupShape& shape) {
  return Rounds::Make(shape.ll_tokens, kLlRows, shape.num_ranks, shape.round_tokens);
}
// Tokens of every rank that a call of mode ll moves at once on GPUs, where calls of one node have
// one round. A call of more tokens has no halves.
constexpr uint64_t GpuLlRoundTokens(const GroupShape& shape) {
  return shape.num_nodes() == 1 ? shape.ll_tokens : LlRoundsOf(shape).tokens;
}

// One entry of the agreed order (xla_ffi/order.h): which call the team executes next.
struct OrderEntry {
  uint64_t run_id;
  uint64_t site;
};
inline constexpr uint64_t kOrderLogEntries = 1024;  // power of two

// A rank that has closed its group has gone in peace: its silence is no failure.
enum class MemberState : uint64_t {
  kRunning = 0,
  kFailed = 1,
  kClosed = 2,
  kAgrees = 3,  // it agrees, or knows that others do (FailureLatch::kAgreement)
};
inline constexpr uint64_t kFailureTextBytes = 1000;

// Why a rank leaves its group.
enum class Departure : uint64_t {
  kClosed = 0,        // the program called close
  kProgramEnded = 1,  // it raised, or ended without a close
  kAgrees = 2,        // Group.agree: the group goes on in a new session
};

// What a rank leaves in the heap of each node-mate, and in that of one rank of each process of
// other nodes, before the barrier of its close. Travels as one write.
struct Farewell {
  std::atomic<uint64_t> num_calls;  // calls that it took part in; it takes part in no other
  std::atomic<Departure> departure;
};
// Likewise, as soon as it agrees. No barrier comes behind it, so it says itself whether it is
// whole.
struct Agreement {
  std::atomic<uint64_t> num_calls;      // as above
  std::atomic<uint64_t> not_num_calls;  // ~num_calls

  void Set(uint64_t value) {
    num_calls.store(value, std::memory_order_relaxed);
    not_num_calls.store(~value, std::memory_order_relaxed);
  }
  // nullopt: it does not agree.
  std::optional<uint64_t> Get() const {
    const uint64_t value = num_calls.load(std::memory_order_relaxed);
    if (not_num_calls.load(std::memory_order_relaxed) != ~value) return std::nullopt;
    return value;
  }
};
static_assert(sizeof(Farewell) == 16 && sizeof(Agreement) == 16, "each is one unit of a command");

// First bytes of every heap. Zero-initialised memory is a valid start. kernels and xla_ffi use it;
// the proxy gets pointers into it.
struct ControlBlock {
  Doorbell doorbell;  // rung after any change of this heap's flags or control words
  alignas(64) std::atomic<uint64_t> heartbeat;  // bumped by the owner's monitor thread
  std::atomic<MemberState> state;               // release store publishes what follows
  std::atomic<Departure> departure;             // when state is kClosed; kAgrees before
  uint64_t blamed_plus_1;                // whose fault a failure was (RankOfTeam); 0: nobody's
  char failure_text[kFailureTextBytes];  // NUL-terminated reason when state is kFailed
  alignas(64) Activity activity;         // of the owner
  // Node leaders only: when a process of the node last wrote a page on who hangs (MonotonicNs).
  std::atomic<uint64_t> reported_ns;
  // The agreed order (node leaders only): entries announced, and entries claimed by an announcer.
  alignas(64) std::atomic<uint64_t> order_count;
  std::atomic<uint64_t> order_claimed;
  alignas(64) OrderEntry order[kOrderLogEntries];
};

// Pointers of the caller's buffers, for node-mates of the same process, by slot set.
// Published by a release store of the flag kDispatch / kReduce of the same epoch.
struct PublishedBuffers {
  const std::byte* rows;        // x or y
  const float* weights;         // dispatch: [T, K]; combine: row_weights [R]
  const float* pair_scalars;    // combine only
  std::atomic<uint32_t> state;  // who reads them, and whether one may: cpu/published.h
};

// Commands count in units of 16 bytes, so everything that may travel is a multiple of that.
inline constexpr uint64_t kWireUnitBytes = 16;
// Areas start on their own cache lines.
inline constexpr uint64_t kAreaAlignBytes = 64;
// Largest depth: a command carries 4 bits of its epoch, and half of that space may be in use.
inline constexpr uint32_t kMaxDepth = 8;
// Slot sets of a plan. No plan waits for a set: who begins plan e has met everyone's records of
// plan e - 1, and each rank sent those after its last read of plan e - 2.
inline constexpr uint32_t kPlanSets = 2;

constexpr uint64_t DivideUp(uint64_t value, uint64_t by) { return (value + by - 1) / by; }
constexpr uint64_t AlignUp(uint64_t value, uint64_t unit) { return DivideUp(value, unit) * unit; }

// Bytes of one row [H] of `type`, and of what follows it ([K] weights or pair scalars), on the
// wire.
constexpr uint64_t RowBytes(uint64_t hidden, ElemType type) {
  return AlignUp(hidden * ElemBytes(type), kWireUnitBytes);
}
constexpr uint64_t ScalarBytes(uint64_t num_floats) {
  return AlignUp(num_floats * sizeof(float), kWireUnitBytes);
}
// The same of a row that travels in FP8: values, scales of its blocks, zeros.
constexpr uint64_t RecordBytes(uint64_t hidden, uint64_t block, Fp8Scale scale) {
  constexpr uint64_t kAlign = 32;
  return AlignUp(hidden + hidden / block * ScaleBytes(scale), kAlign);
}

// An array of equal blocks in the heap: block (set, peer) is at At(set, peer).
struct HeapArea {
  uint64_t offset = 0;
  uint64_t set_stride = 0;
  uint64_t peer_stride = 0;

  constexpr uint64_t At(uint64_t set, uint64_t peer = 0) const {
    return offset + set * set_stride + peer * peer_stride;
  }
};

// Where everything is in a heap, in bytes from its start: plain data, the same on every rank.
// "[peer]" is a rank where it says N, a node where it says M. T is that of a round, where it says
// C. Rows inside a block are packed with the pitch of the call at hand (no room for a part that the
// call does not carry), never more than the block has. Blocks named *_send are the local source of
// commands, *_recv and ll_disp, ll_comb their targets.
//
// Who writes: each rank its own heap, but for *_recv and ll_* (the peer that the block names, by a
// command or, of ll, by store inside the node). Who reads: node-mates read plan_send, plan_recv,
// stage, reduce_stage and net_recv of each other; all else is its owner's.
struct HeapLayout {
  uint64_t total_bytes = 0;
  uint32_t num_ranks = 0;
  Rounds dispatch_rounds, combine_rounds;  // ht
  Rounds ll_rounds;
  uint32_t ll_slots = 0;           // min(N, K): partials of a token (LlSlot)
  uint64_t flags_offset = 0;       // u64 [kNumChannels][N]
  uint64_t farewells_offset = 0;   // Farewell [N]
  uint64_t agreements_offset = 0;  // Agreement [N]
  HeapArea dispatch_published;     // PublishedBuffers
  HeapArea combine_published;      // PublishedBuffers
  uint64_t plan_counts_bytes = 0;  // of {i32 num_locally_dropped, 3 * i32 unused, i32 counts[E]}
  // HT
  HeapArea plan_send;      // plan_counts, then i32 codes by destination, segments at 16 bytes
  HeapArea plan_recv;      // [M] plan_counts, then the codes for this node, from the rank of equal
                           // local index in that one, which may send all of its pairs here
  HeapArea stage;          // rows [T]: row, weights [K]
  HeapArea send_stage;     // [M] i32 map [C] (token -> packed row, -1), then packed rows
  HeapArea net_recv;       // [M] the same, from the rank of equal local index in that node
  HeapArea reduce_stage;   // [N] presence u8 [C], then rows [C]: rank partial, pair scalars [K]
  HeapArea comb_send;      // [M] packed rows [C]: node partial, pair scalars [node_size][K]
  HeapArea comb_recv;      // [M] the same
  uint64_t map_bytes = 0;  // of the map above
  uint64_t presence_bytes = 0;  // of the presence above
  // LL
  HeapArea ll_disp;            // [N] meta, then rows [C]
  HeapArea ll_disp_send;       // meta, then rows [T]
  HeapArea ll_comb;            // rows [T][ll_slots]: rank partial, pair scalars [K]
  HeapArea ll_comb_send;       // [N] such rows [C]
  uint64_t ll_topk_bytes = 0;  // of i32 topk_idx [T * K]
  uint64_t ll_meta_bytes = 0;  // {i32 T, 3 * i32 unused}, topk_idx, then f32 weights [T * K]

  constexpr uint64_t flag_offset(Channel channel, uint32_t source) const {
    return flags_offset + (static_cast<uint64_t>(channel) * num_ranks + source) * sizeof(uint64_t);
  }

  // That flag in the heap that begins there.
  std::atomic<uint64_t>& FlagIn(std::byte* heap, Channel channel, uint32_t source) const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(heap + flag_offset(channel, source));
  }

  constexpr uint64_t farewell_offset(uint32_t source) const {
    return farewells_offset + source * sizeof(Farewell);
  }
  constexpr uint64_t agreement_offset(uint32_t source) const {
    return agreements_offset + source * sizeof(Agreement);
  }

  static constexpr HeapLayout Make(const GroupShape& shape);
};

constexpr HeapLayout HeapLayout::Make(const GroupShape& shape) {
  HeapLayout layout;
  layout.num_ranks = shape.num_ranks;
  uint64_t end = 0;
  const auto take = [&end](uint64_t bytes) {
    const uint64_t begin = end;
    end = AlignUp(end + bytes, kAreaAlignBytes);
    return begin;
  };
  const auto take_area = [&](uint64_t num_sets, uint64_t num_peers, uint64_t block_bytes) {
    HeapArea area;
    area.peer_stride = AlignUp(block_bytes, kAreaAlignBytes);
    area.set_stride = num_peers * area.peer_stride;
    area.offset = take(num_sets * area.set_stride);
    return area;
  };
  const uint64_t num_ranks = shape.num_ranks;
  const uint64_t num_nodes = shape.num_nodes();
  const uint64_t depth = shape.depth;
  const uint64_t int_bytes = sizeof(int32_t);
  const uint64_t ints_per_unit = kWireUnitBytes / int_bytes;
  const ElemType partial_type = shape.f32_partials ? ElemType::kF32 : shape.elem_type;
  const uint64_t row_bytes = RowBytes(shape.hidden, shape.elem_type);
  const uint64_t partial_bytes = RowBytes(shape.hidden, partial_type);
  const uint64_t scalar_bytes = ScalarBytes(shape.top_k);

  take(sizeof(ControlBlock));
  layout.flags_offset = take(kNumChannels * num_ranks * sizeof(uint64_t));
  layout.farewells_offset = take(num_ranks * sizeof(Farewell));
  layout.agreements_offset = take(num_ranks * sizeof(Agreement));
  layout.dispatch_published = take_area(depth, 1, sizeof(PublishedBuffers));
  layout.combine_published = take_area(depth, 1, sizeof(PublishedBuffers));
  layout.plan_counts_bytes =
      AlignUp((ints_per_unit + shape.num_experts) * int_bytes, kWireUnitBytes);

  layout.ll_slots = shape.num_ranks < shape.top_k ? shape.num_ranks : shape.top_k;

  if (shape.has_ht) {
    const uint64_t tokens = shape.max_tokens;
    layout.dispatch_rounds = Rounds::Make(tokens, kDispatchBlocks * tokens, num_nodes,
                                          num_nodes > 1 ? shape.round_tokens : 0);
    layout.combine_rounds =
        Rounds::Make(tokens, kCombineBlocks * tokens, num_ranks, shape.round_tokens);
    const uint64_t sent_tokens = layout.dispatch_rounds.tokens;
    const uint64_t summed_tokens = layout.combine_rounds.tokens;
    const uint64_t code_bytes = tokens * shape.top_k * int_bytes;
    layout.map_bytes = AlignUp(sent_tokens * int_bytes, kWireUnitBytes);
    layout.presence_bytes = AlignUp(summed_tokens, kWireUnitBytes);
    layout.plan_send =
        take_area(kPlanSets, 1, layout.plan_counts_bytes + code_bytes + num_ranks * kWireUnitBytes);
    layout.stage = take_area(depth, 1, tokens * (row_bytes + scalar_bytes));
    const uint64_t sum_sets = layout.combine_rounds.num_sets(depth);
    layout.reduce_stage =
        take_area(sum_sets, num_ranks,
                  layout.presence_bytes + summed_tokens * (partial_bytes + scalar_bytes));
    if (num_nodes > 1) {
      layout.plan_recv =
          take_area(kPlanSets, num_nodes,
                    layout.plan_counts_bytes + code_bytes + shape.node_size * kWireUnitBytes);
      const uint64_t rows_bytes = layout.map_bytes + sent_tokens * (row_bytes + scalar_bytes);
      const uint64_t row_sets = layout.dispatch_rounds.num_sets(depth);
      layout.send_stage = take_area(row_sets, num_nodes, rows_bytes);
      layout.net_recv = take_area(row_sets, num_nodes, rows_bytes);
      const uint64_t node_scalar_bytes =
          ScalarBytes(static_cast<uint64_t>(shape.node_size) * shape.top_k);
      const uint64_t sums_bytes = summed_tokens * (partial_bytes + node_scalar_bytes);
      layout.comb_send = take_area(sum_sets, num_nodes, sums_bytes);
      layout.comb_recv = take_area(sum_sets, num_nodes, sums_bytes);
    }
  }
  if (shape.ll_tokens > 0) {
    const uint64_t tokens = shape.ll_tokens;
    layout.ll_topk_bytes = AlignUp(tokens * shape.top_k * int_bytes, kWireUnitBytes);
    layout.ll_meta_bytes = kWireUnitBytes + 2 * layout.ll_topk_bytes;
    layout.ll_rounds = LlRoundsOf(shape);
    const uint64_t sets = layout.ll_rounds.num_sets(depth);
    const uint64_t round_tokens = layout.ll_rounds.tokens;
    const uint64_t sum_bytes = partial_bytes + scalar_bytes;
    layout.ll_disp = take_area(sets, num_ranks, layout.ll_meta_bytes + round_tokens * row_bytes);
    layout.ll_comb = take_area(sets, 1, tokens * layout.ll_slots * sum_bytes);
    if (num_nodes > 1) {
      layout.ll_disp_send = take_area(sets, 1, layout.ll_meta_bytes + tokens * row_bytes);
      layout.ll_comb_send = take_area(sets, num_ranks, round_tokens * sum_bytes);
    }
  }
  layout.total_bytes = end;
  return layout;
}

}  // namespace jax_ep
