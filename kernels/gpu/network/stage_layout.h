// Byte layout of a rank's network stage: memory that its kernels and those of its node-mates load
// and store, and that proxies move between nodes; the host's, pinned, or the GPU's (api.h).
// Computed from the group's shape alone, so that all ranks agree by construction. Only groups of
// several nodes have one, and signals beside it: u64 [kNumChannels][N] in pinned host memory, which
// count what has come from each rank on a channel (counted channels: epochs).
//
// "Rail": the ranks of equal index inside their nodes. What goes to another node goes once, to the
// rank of the own rail there; its node-mates read it from that rank's stage.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/gpu/protocol/heap_layout.h"
#include "kernels/layout.h"
#include "proxy/abi/channel.h"

namespace jax_ep::gpu {

// What a source says of its HT call, with its first signal: ranks of other nodes see no flags of it
// (protocol/control.cuh), and take nothing from a call of another program.
struct alignas(kWireUnitBytes) CallRecord {
  uint64_t call;  // FlagValue
};
static_assert(sizeof(CallRecord) == kWireUnitBytes);

struct NetLayout {
  uint64_t total_bytes = 0;
  // Plan, by parity of the plan's number. "[O]": by OtherNode of the other node.
  HeapArea counts_send;  // [2]: PlanHeader, i32 [E]
  HeapArea counts_recv;  // [2][O]: the same, of the rail's rank there
  HeapArea list_send;    // [2]: i32 [T * K], the plan list of this rank
  HeapArea list_recv;    // [2][O]: the part of it that names rows of this node, at the same place
  uint64_t counts_bytes = 0;
  uint64_t list_bytes = 0;
  // HT dispatch, in the sets [S] that rounds take in turn: S = num_round_sets, T' =
  // HtRounds.tokens. Weights are those of the whole call, in the set of its first round.
  uint64_t num_round_sets = 0;
  HeapArea rows_send;  // [S]: rows [T', H] without padding, CallRecord, weights [T * K]
  HeapArea rows_recv;  // [S][O]: the same, of the rail's rank there; rows with a pair here
  uint64_t rows_call = 0, rows_weights = 0;
  // HT combine, likewise: rows [T'] of kind Partial, scalars [T'][node_size][K], CallRecord.
  HeapArea sums_send;  // [S][O]
  HeapArea sums_recv;  // [S][O]
  uint64_t sums_pitch = 0;
  uint64_t sums_scalars = 0, sums_call = 0;
  // LL, by slot set. "[R]": by RemoteIndex of the other rank; T' is GpuLlRoundTokens. A record is
  // followed by a u64 tag, the StartFlag of its call, because a count says how many records have
  // come and not which.
  HeapArea ll_rows_send;  // [depth]: PushHeader, weights [T * K], ids [T * K]; records [T']: a row
  HeapArea ll_rows_recv;  // [depth][R]: the same
  uint64_t ll_weights = 0, ll_ids = 0, ll_head_bytes = 0;
  uint64_t ll_row_pitch = 0, ll_row_tag = 0;
  HeapArea ll_sums_send;  // [depth][R]: records [T']: a partial, scalars [K]
  HeapArea ll_sums_recv;  // [depth][R]
  uint64_t ll_sum_pitch = 0, ll_sum_scalars = 0, ll_sum_tag = 0;

  static constexpr NetLayout Make(const GroupShape& shape);
};

constexpr NetLayout NetLayout::Make(const GroupShape& shape) {
  NetLayout layout;
  if (shape.num_nodes() == 1) return layout;
  uint64_t end = 0;
  const auto take = [&end](uint64_t sets, uint64_t peers, uint64_t bytes) {
    HeapArea area;
    area.peer_stride = AlignUp(bytes, kRowAlignBytes);
    area.set_stride = peers * area.peer_stride;
    area.offset = end;
    end += sets * area.set_stride;
    return area;
  };
  const uint64_t num_remote = shape.num_ranks - shape.node_size;
  const uint64_t num_others = shape.num_nodes() - 1;
  const ElemType partial_type = shape.f32_partials ? ElemType::kF32 : shape.elem_type;
  const uint64_t row_bytes = shape.hidden * ElemBytes(shape.elem_type);
  constexpr uint64_t kParities = 2;

  layout.counts_bytes =
      AlignUp(sizeof(PlanHeader) + shape.num_experts * sizeof(int32_t), kWireUnitBytes);
  const uint64_t tokens = shape.has_ht ? shape.max_tokens : 0;
  const uint64_t cells_bytes = AlignUp(tokens * shape.top_k * sizeof(int32_t), kWireUnitBytes);
  layout.list_bytes =
      AlignUp((shape.max_tokens > shape.ll_tokens ? shape.max_tokens : shape.ll_tokens) *
                  shape.top_k * sizeof(int32_t),
              kWireUnitBytes);
  layout.counts_send = take(kParities, 1, layout.counts_bytes);
  layout.counts_recv = take(kParities, num_others, layout.counts_bytes);
  layout.list_send = take(kParities, 1, layout.list_bytes);
  layout.list_recv = take(kParities, num_others, layout.list_bytes);

  const HtRounds rounds = HtRoundsOf(shape);
  const uint64_t sets = layout.num_round_sets = rounds.num_stage_sets();
  layout.rows_call = AlignUp(rounds.tokens * row_bytes, kRowAlignBytes);
  layout.rows_weights = layout.rows_call + sizeof(CallRecord);
  layout.rows_send = take(sets, 1, layout.rows_weights + cells_bytes);
  layout.rows_recv = take(sets, num_others, layout.rows_weights + cells_bytes);
  layout.sums_pitch = RowBytes(shape.hidden, partial_type);
  layout.sums_scalars = AlignUp(rounds.tokens * layout.sums_pitch, kRowAlignBytes);
  const uint64_t sum_cells = rounds.tokens * shape.node_size * shape.top_k;
  layout.sums_call =
      layout.sums_scalars + AlignUp(sum_cells * sizeof(float), kWireUnitBytes) + kRowAlignBytes;
  const uint64_t sums_bytes = layout.sums_call + sizeof(CallRecord);
  layout.sums_send = take(sets, num_others, sums_bytes);
  layout.sums_recv = take(sets, num_others, sums_bytes);

  if (shape.ll_tokens > 0) {
    const uint64_t ll_cells_bytes =
        AlignUp(shape.ll_tokens * shape.top_k * sizeof(int32_t), kWireUnitBytes);
    layout.ll_weights = AlignUp(sizeof(PushHeader), kWireUnitBytes);
    layout.ll_ids = layout.ll_weights + ll_cells_bytes;
    layout.ll_head_bytes = layout.ll_ids + ll_cells_bytes;
    layout.ll_row_tag = RowBytes(shape.hidden, shape.elem_type);
    layout.ll_row_pitch = layout.ll_row_tag + kWireUnitBytes;
    const uint64_t round_tokens = GpuLlRoundTokens(shape);
    const uint64_t rows_bytes = layout.ll_head_bytes + round_tokens * layout.ll_row_pitch;
    layout.ll_rows_send = take(shape.depth, 1, rows_bytes);
    layout.ll_rows_recv = take(shape.depth, num_remote, rows_bytes);
    layout.ll_sum_scalars = layout.sums_pitch;
    layout.ll_sum_tag = layout.ll_sum_scalars + ScalarBytes(shape.top_k);
    layout.ll_sum_pitch = layout.ll_sum_tag + kWireUnitBytes;
    layout.ll_sums_send = take(shape.depth, num_remote, round_tokens * layout.ll_sum_pitch);
    layout.ll_sums_recv = take(shape.depth, num_remote, round_tokens * layout.ll_sum_pitch);
  }
  layout.total_bytes = end;
  return layout;
}

// Bytes of a token in the longest command of neighbours: its row, its partial or its record.
constexpr uint64_t MostTokenBytes(const NetLayout& layout, const GroupShape& shape) {
  return std::max({shape.hidden * ElemBytes(shape.elem_type), layout.sums_pitch,
                   layout.ll_row_pitch, layout.ll_sum_pitch});
}

// Position of a rank's signal on a channel among another rank's signals, and how many those are.
constexpr uint64_t SignalIndex(uint32_t num_ranks, Channel channel, uint32_t source) {
  return static_cast<uint64_t>(channel) * num_ranks + source;
}
constexpr uint64_t NumSignals(uint32_t num_ranks) { return uint64_t{kNumChannels} * num_ranks; }

// Position of another node among those that are not `own_node`, and back.
constexpr uint32_t OtherNode(uint32_t num_nodes, uint32_t own_node, uint32_t node) {
  return (node + num_nodes - own_node - 1) % num_nodes;
}
constexpr uint32_t NodeOfOther(uint32_t num_nodes, uint32_t own_node, uint32_t other) {
  return (own_node + 1 + other) % num_nodes;
}
// Position of a rank of another node among all of those.
constexpr uint32_t RemoteIndex(const GroupShape& shape, uint32_t own_node, uint32_t rank) {
  return OtherNode(shape.num_nodes(), own_node, rank / shape.node_size) * shape.node_size +
         rank % shape.node_size;
}

}  // namespace jax_ep::gpu
