// Byte layout of a GPU rank's heap, computed from the group's shape alone, so that all ranks agree
// by construction. The host allocates it zero-initialised; kernels address it.
//
// A program that was captured in a graph can run after its group was closed: nobody on the host is
// asked. So the first kept_bytes of a heap stay mapped for the life of the process, with
// Control.failed set, and no kernel of a rank that has failed touches anything of any heap, stage
// or ring but those. It writes its outputs (poison) and ends.
#pragma once

#include <cstdint>

#include "kernels/gpu/protocol/ht_rounds.h"
#include "kernels/gpu/protocol/plan_slices.h"
#include "kernels/layout.h"

namespace jax_ep::gpu {

// Tokens of one combine flag in mode ht.
inline constexpr uint64_t kChunkTokens = 8;
// Blocks that may count the pairs of a plan.
inline constexpr uint64_t kMaxPlanBlocks = 64;

// Slices of recv_src that blocks index, at most.
inline constexpr uint32_t kMostRowSlices = 63;

// Slices of the tokens in which a round of an HT call crosses nodes, at most (token_slices.h).
inline constexpr uint64_t kMostTokenSlices = 8;

// Blocks of rows and arrays begin at multiples of this.
inline constexpr uint64_t kRowAlignBytes = 256;

// From one record to the next in a stage. A bulk load that begins amid a line takes more bytes on
// NVLink's links (docs/performance.md, "Dispatch in FP8").
constexpr uint64_t RecordPitch(uint64_t record_bytes) {
  constexpr uint64_t kLine = 128;
  return AlignUp(record_bytes, kLine);
}

// First bytes of a heap. Written by its owner's kernels only.
struct alignas(64) Control {
  // Operations finished, the running one is sequence + 1; one with an open end (open_end.cuh)
  // counts when all of its blocks have read this.
  uint64_t sequence;
  uint32_t busy;    // not 0 from an operation's begin until it counts; of some the launch (entry.h)
  uint32_t failed;  // sticky: 1 once this rank has given up, or its group was closed
  uint32_t arrivals;  // blocks of the running kernel that are through
  // Work of the running combine that has been taken (without bulk copies: all of it is counted in
  // the first word); 0 between combines.
  uint32_t partials_taken;
  uint32_t sums_taken;
  // Items of each slice of the running dispatch's round that have been taken, besides the first of
  // each warp; in the first one before that those of the node's own rows. 0 between dispatches.
  uint32_t items_taken[kMostTokenSlices];
  uint32_t records_taken;   // of the running dispatch whose rows are quantised; 0 between such
  uint32_t blocks_started;  // of the running combine with bulk copies; 0 between combines
  // Of the running operation whose main kernel indexes recv_src (entry.cuh), a bit each: slices
  // that are indexed, and above them that the entry is published; 0 between such.
  uint64_t slices_done;
  // Of operations with an open end (open_end.cuh): blocks of all that came before the one of
  // `sequence` + 1, blocks that have read what theirs leaves behind, blocks that have ended. They
  // only grow, and wrap. And what the latter two were when outputs were last poisoned.
  uint32_t blocks_before, blocks_reading, blocks_ended, blocks_poisoned;
  uint64_t sliced_plans;  // plans with one exchange; its parity is the set of the next one
  uint64_t stamped;       // newest operation whose begin is in the trace
  // Totals for RankCountersSnapshot.
  uint64_t plans, dispatches, combines, rows_received, rows_dropped, bytes_pulled, bytes_staged,
      last_overflow, invalid_ids;
};

// Calls whose rows wait in slot sets, those of mode ll. Each kind has its own sets (slot_sets.cuh).
enum class SetKind : uint32_t { kLlDispatch = 0, kLlCombine = 1 };
inline constexpr uint64_t kNumSetKinds = 2;

// One slot set of a kind, as its owner's kernels see it. Operations are named by their numbers.
struct SlotSet {
  uint64_t started;  // that used it last
  uint64_t done;     // that read it last
  uint32_t is_open;  // 1: begun, not yet done
  uint32_t program;  // fingerprint of the call that used it last
};
struct SetState {
  uint64_t last_done;  // newest operation that read a set of the kind
  SlotSet sets[kMaxDepth];
};

inline constexpr uint64_t kNetStateBytes = 16384;      // room for NetState
inline constexpr uint64_t kDeviceNetworkBytes = 4096;  // room for DeviceNetwork

// Most pieces that a pushed row is cut into; each has its own flag.
inline constexpr uint64_t kMaxPieces = 16;

// Rows that peers push, by set and source.
struct PushArea {
  HeapArea blocks;      // [depth][N]: what comes before the rows, then rows [T'], those of a round
  uint64_t rows = 0;    // where they begin in a block
  uint64_t pitch = 0;   // bytes between them
  HeapArea flags;       // u64 [depth][N][T'][kMaxPieces]: newest operation that filled the piece
  HeapArea meta_flags;  // u64 [depth][N]: ... of a combine that has begun
};

// Rows that peers push in tagged words, by set and source (tagged_rows.cuh), and partials in wide
// ones (tagged_partials.cuh).
struct TaggedArea {
  HeapArea blocks;     // [depth][N]: rows [tagged_tokens]
  uint64_t pitch = 0;  // bytes between them
};
// Of calls with few tokens in groups of few ranks: such words take twice the bytes of their rows.
inline constexpr uint64_t kMostTaggedTokens = 32;
inline constexpr uint64_t kMostTaggedRanks = 16;
// A wide word, and what it has of a partial beside the tag.
inline constexpr uint64_t kWideWordBytes = 16, kWideDataBytes = 12;
constexpr uint64_t WideWords(uint64_t num_bytes) { return DivideUp(num_bytes, kWideDataBytes); }

// What a source says of its dispatch; all ranks must agree.
struct PushHeader {
  enum Word : uint32_t {
    kNumTokens,
    kRecvRows,  // 0 if a start says it, which does not know
    kLayout,
    kHasIds,  // 1: a plan is made from the ids that follow
    kCall,    // CallWord
    kNumWords
  };
  int32_t words[kNumWords];
};

// Where a source's rows are for one dispatch: (offset << 1) | in_arena, see PlaceOf.
struct DispatchRecord {
  uint64_t x;
  uint64_t weights;
};

// First 16 bytes of a source's counts; counts [E] follow. All but the first must agree.
struct PlanHeader {
  int32_t num_locally_dropped;
  int32_t num_tokens;
  int32_t recv_rows;
  uint16_t layout;
  uint16_t program;  // FingerprintOf; flags of other nodes do not have it
};

// Pairs of one source for one local expert.
struct PlanSegment {
  int32_t row_begin;  // first row of its kept pairs
  int32_t num_kept;
  int32_t list_begin;  // first of its codes in the source's list
  int32_t reserved;
};

struct GpuHeapLayout {
  uint64_t total_bytes = 0;
  // What a kernel may touch before it knows that its rank has not failed. Small: it outlives
  // groups.
  uint64_t kept_bytes = 0;
  uint64_t control = 0;       // Control
  uint64_t set_states = 0;    // SetState [kNumSetKinds]
  uint64_t slice_claims = 0;  // u64 [kMaxPlanSlices]: FlagValue of the newest plan that counted it
  // Groups of several nodes only.
  uint64_t net_state = 0;       // NetState (network.h)
  uint64_t device_network = 0;  // DeviceNetwork, written when the rank is created
  // u64 [N]: of the newest step whose partials are there, and that was the last of a round which is
  // through (network/steps.cuh).
  uint64_t filled_flags = 0, left_flags = 0;
  // Written by peers, by source rank.
  uint64_t entry_flags = 0;  // u64 [N]: FlagValue of the newest operation that it entered
  uint64_t tail_flags = 0;   // u64 [N]: of the newest call whose reads, or scalars, are done with
  uint64_t list_flags = 0;   // u64 [N]: of the newest plan whose list can be read
  uint64_t slice_flags = 0;  // u64 [N][kMaxPlanSlices]: likewise, with one exchange, of a slice
  uint64_t peer_failed = 0;  // u32: 1 + a rank that has given up, 0: none
  uint64_t consumed_flags = 0;  // u64 [kNumSetKinds][N]: newest operation that read the kind's sets
  // From here on not kept. Written by peers, by source rank.
  uint64_t chunk_flags = 0;  // u64 [N][num_chunks]: of the newest combine that filled the chunk
  uint64_t num_chunks = 0;
  uint64_t record_flags = 0;  // u64 [N][num_record_flags]: newest dispatch that quantised the row
  uint64_t num_record_flags = 0;
  uint64_t records = 0;  // DispatchRecord [N]
  // Written by this rank's plans: u64 [E_l] (RankCounters).
  uint64_t pairs_per_expert = 0;
  uint64_t num_local_experts = 0;
  // Written by this rank's waits: u64 [kNumWaitPhases][N], by the rank that was waited for.
  uint64_t wait_ns = 0;
  HeapArea plan_counts;  // [2][N]: PlanHeader, i32 [E]
  HeapArea plan_slices;  // [2][N][MostPlanSlices]: PlanHeader, u16 [E]; groups of one node
  uint64_t plan_slice_stride = 0;
  // Partials of a round of a combine, in the sets [A] that rounds take in turn: blocks [N - 1], see
  // ReduceBlock, of its tokens [T']; A = rounds.num_reduce_sets(), T' = rounds.tokens.
  HtRounds rounds;
  uint64_t reduce_rows = 0;  // [A][N - 1][T'] partials
  uint64_t reduce_pitch = 0;
  uint64_t reduce_scalars = 0;  // f32 [A][N - 1][T'][K]
  // Before its rows each block of ll_dispatch has a PushHeader, ids [T * K] and weights [T * K] in
  // tagged words (tagged_words.cuh), each block of a combine scalars [T' * K].
  PushArea ll_dispatch, ll_combine;
  uint64_t ll_round_tokens = 0;  // T' of both: GpuLlRoundTokens
  // The rows of calls with at most so many tokens. Nothing but tagged words is ever written there,
  // of one width in each, so nothing else can look like one.
  TaggedArea ll_dispatch_tagged, ll_combine_tagged;
  uint64_t tagged_tokens = 0;
  uint64_t push_ids = 0;  // in a block of ll_dispatch
  uint64_t push_weights = 0;
  // Read by peers.
  uint64_t plan_list = 0;      // i32 [T * K]
  HeapArea plan_entries;       // [2]: PairEntry [T * K]; groups of one node
  uint64_t stage_rows = 0;     // [T, H], or records [T], one each RecordPitch
  uint64_t stage_weights = 0;  // f32 [T * K]
  // Private.
  uint64_t pair_ranks = 0;     // i32 [T * K]: pairs of the same expert before it in its block
  uint64_t block_counts = 0;   // i32 [kMaxPlanBlocks][E]
  uint64_t block_offsets = 0;  // i32 [kMaxPlanBlocks][E]
  uint64_t block_drops = 0;    // i32 [kMaxPlanBlocks][2]: dropped, invalid
  uint64_t segments = 0;       // PlanSegment [E_l][N]
  uint64_t row_index = 0;      // u64 [N][T][K]: (tag << 32) | row
  // Groups of several nodes only.
  HeapArea remote_lists;         // [1][N - node_size]: i32 [T * K], see NetLayout::list_recv
  uint64_t reduce_presence = 0;  // u32 [A][N - 1][T']: tag of the newest step with a partial
  uint64_t net_wanted = 0;       // u32 [chunks of a round][other node] (send.cuh)

  // Block of the reduce area of `owner` that `holder` writes.
  static constexpr uint64_t ReduceBlock(uint32_t num_ranks, uint32_t owner, uint32_t holder) {
    return (holder + num_ranks - owner - 1) % num_ranks;
  }

  static constexpr GpuHeapLayout Make(const GroupShape& shape);
};

// A row pitch that is a multiple of 768 bytes puts equal columns of all rows on few memory
// partitions (6144 bf16 elements; docs of the H200).
constexpr uint64_t SpreadPitch(uint64_t bytes) {
  const uint64_t pitch = AlignUp(bytes, kWireUnitBytes);
  return pitch % 768 == 0 ? pitch + 256 : pitch;
}

constexpr GpuHeapLayout GpuHeapLayout::Make(const GroupShape& shape) {
  GpuHeapLayout layout;
  uint64_t end = 0;
  const auto take = [&end](uint64_t bytes) {
    constexpr uint64_t kAlign = 256;
    const uint64_t begin = end;
    end = AlignUp(end + bytes, kAlign);
    return begin;
  };
  const uint64_t num_ranks = shape.num_ranks;
  const uint64_t ht_tokens = shape.has_ht ? shape.max_tokens : 0;
  const uint64_t tokens = ht_tokens > shape.ll_tokens ? ht_tokens : shape.ll_tokens;
  const uint64_t pairs = tokens * shape.top_k;
  const uint64_t experts = shape.num_experts;

  layout.control = take(sizeof(Control));
  layout.entry_flags = take(num_ranks * sizeof(uint64_t));
  layout.tail_flags = take(num_ranks * sizeof(uint64_t));
  layout.list_flags = take(num_ranks * sizeof(uint64_t));
  layout.slice_flags = take(num_ranks * kMaxPlanSlices * sizeof(uint64_t));
  layout.slice_claims = take(kMaxPlanSlices * sizeof(uint64_t));
  layout.peer_failed = take(sizeof(uint32_t));
  layout.consumed_flags = take(kNumSetKinds * num_ranks * sizeof(uint64_t));
  layout.set_states = take(kNumSetKinds * sizeof(SetState));
  if (shape.num_nodes() > 1) {
    layout.net_state = take(kNetStateBytes);
    layout.device_network = take(kDeviceNetworkBytes);
    layout.filled_flags = take(num_ranks * sizeof(uint64_t));
    layout.left_flags = take(num_ranks * sizeof(uint64_t));
  }
  layout.kept_bytes = end;
  layout.num_chunks = (ht_tokens + kChunkTokens - 1) / kChunkTokens;
  layout.chunk_flags = take(num_ranks * layout.num_chunks * sizeof(uint64_t));
  layout.num_record_flags = ht_tokens;
  layout.record_flags = take(num_ranks * layout.num_record_flags * sizeof(uint64_t));
  layout.records = take(num_ranks * sizeof(DispatchRecord));
  layout.num_local_experts = shape.experts_per_rank();
  layout.pairs_per_expert = take(layout.num_local_experts * sizeof(uint64_t));
  layout.wait_ns = take(kNumWaitPhases * num_ranks * sizeof(uint64_t));

  layout.plan_counts.peer_stride =
      AlignUp(sizeof(PlanHeader) + experts * sizeof(int32_t), kAreaAlignBytes);
  layout.plan_counts.set_stride = num_ranks * layout.plan_counts.peer_stride;
  layout.plan_counts.offset = take(2 * layout.plan_counts.set_stride);
  if (shape.num_nodes() == 1) {
    layout.plan_slice_stride =
        AlignUp(sizeof(PlanHeader) + experts * sizeof(uint16_t), kWireUnitBytes);
    layout.plan_slices.peer_stride = MostPlanSlices(shape.num_ranks) * layout.plan_slice_stride;
    layout.plan_slices.set_stride = num_ranks * layout.plan_slices.peer_stride;
    layout.plan_slices.offset = take(2 * layout.plan_slices.set_stride);
    layout.plan_entries.set_stride = AlignUp(pairs * sizeof(uint32_t), kRowAlignBytes);
    layout.plan_entries.offset = take(2 * layout.plan_entries.set_stride);
  }

  const ElemType partial_type = shape.f32_partials ? ElemType::kF32 : shape.elem_type;
  layout.reduce_pitch = SpreadPitch(shape.hidden * ElemBytes(partial_type));
  layout.rounds = HtRoundsOf(shape);
  const uint64_t num_partials =
      layout.rounds.num_reduce_sets() * (num_ranks - 1) * layout.rounds.tokens;
  layout.reduce_rows = take(num_partials * layout.reduce_pitch);
  layout.reduce_scalars = take(num_partials * shape.top_k * sizeof(float));

  layout.plan_list = take(pairs * sizeof(int32_t));
  layout.stage_rows = take(ht_tokens * RecordPitch(shape.hidden * ElemBytes(shape.elem_type)));
  layout.stage_weights = take(ht_tokens * shape.top_k * sizeof(float));

  layout.pair_ranks = take(pairs * sizeof(int32_t));
  layout.block_counts = take(kMaxPlanBlocks * experts * sizeof(int32_t));
  layout.block_offsets = take(kMaxPlanBlocks * experts * sizeof(int32_t));
  layout.block_drops = take(kMaxPlanBlocks * 2 * sizeof(int32_t));
  layout.segments = take(experts * sizeof(PlanSegment));
  layout.row_index = take(num_ranks * pairs * sizeof(uint64_t));

  const uint64_t depth = shape.depth;
  const auto take_pushed = [&](uint64_t area_tokens, uint64_t head_bytes, uint64_t pitch) {
    PushArea area;
    if (area_tokens == 0) return area;
    area.rows = AlignUp(head_bytes, kRowAlignBytes);
    area.pitch = pitch;
    area.blocks.peer_stride = AlignUp(area.rows + area_tokens * pitch, kRowAlignBytes);
    area.blocks.set_stride = num_ranks * area.blocks.peer_stride;
    area.blocks.offset = take(depth * area.blocks.set_stride);
    area.flags.peer_stride = area_tokens * kMaxPieces * sizeof(uint64_t);
    area.flags.set_stride = num_ranks * area.flags.peer_stride;
    area.flags.offset = take(depth * area.flags.set_stride);
    area.meta_flags.peer_stride = sizeof(uint64_t);
    area.meta_flags.set_stride = num_ranks * sizeof(uint64_t);
    area.meta_flags.offset = take(depth * area.meta_flags.set_stride);
    return area;
  };
  const uint64_t ll_tokens = shape.ll_tokens;
  layout.ll_round_tokens = GpuLlRoundTokens(shape);
  const uint64_t ll_scalars_bytes =
      AlignUp(layout.ll_round_tokens * shape.top_k * sizeof(float), kRowAlignBytes);
  constexpr uint64_t kTaggedBytes = sizeof(uint64_t);
  const uint64_t ll_words_bytes = AlignUp(ll_tokens * shape.top_k * kTaggedBytes, kRowAlignBytes);
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  layout.push_ids = AlignUp(PushHeader::kNumWords * kTaggedBytes, kRowAlignBytes);
  layout.push_weights = layout.push_ids + ll_words_bytes;
  layout.ll_dispatch = take_pushed(layout.ll_round_tokens, layout.push_weights + ll_words_bytes,
                                   SpreadPitch(row_bytes));
  layout.ll_combine = take_pushed(layout.ll_round_tokens, ll_scalars_bytes, layout.reduce_pitch);
  if (shape.num_nodes() == 1 && num_ranks > 1 && num_ranks <= kMostTaggedRanks) {
    layout.tagged_tokens = ll_tokens < kMostTaggedTokens ? ll_tokens : kMostTaggedTokens;
  }
  const auto take_tagged = [&](uint64_t bytes) {
    TaggedArea area;
    if (layout.tagged_tokens == 0) return area;
    area.pitch = AlignUp(bytes, kRowAlignBytes);
    area.blocks.peer_stride = layout.tagged_tokens * area.pitch;
    area.blocks.set_stride = num_ranks * area.blocks.peer_stride;
    area.blocks.offset = take(depth * area.blocks.set_stride);
    return area;
  };
  layout.ll_dispatch_tagged =
      take_tagged(AlignUp(row_bytes, kWireUnitBytes) / sizeof(uint32_t) * kTaggedBytes);
  const uint64_t partial_bytes = AlignUp(shape.hidden * ElemBytes(partial_type), kWireUnitBytes);
  // Each piece may end amid a word.
  layout.ll_combine_tagged = take_tagged((WideWords(partial_bytes) + kMaxPieces) * kWideWordBytes);
  if (shape.num_nodes() > 1) {
    layout.remote_lists.peer_stride = AlignUp(pairs * sizeof(int32_t), kRowAlignBytes);
    layout.remote_lists.offset =
        take((num_ranks - shape.node_size) * layout.remote_lists.peer_stride);
    layout.reduce_presence = take(num_partials * sizeof(uint32_t));
    const uint64_t net_chunks = (layout.rounds.tokens + kNetChunkTokens - 1) / kNetChunkTokens;
    layout.net_wanted = take(net_chunks * (shape.num_nodes() - 1) * sizeof(uint32_t));
  }
  layout.total_bytes = end;
  return layout;
}

}  // namespace jax_ep::gpu
