// What a caller of the kernels sees: one rank's view of its team, the parameters of each operation,
// and the launchers. No CUDA, XLA or Python. Layouts of exchanged memory are in layout.h.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/layout.h"
#include "proxy/abi/channel.h"
#include "proxy/abi/ring.h"
#include "proxy/base/failure.h"
#include "proxy/base/proxy_port.h"
#include "proxy/base/rank_name.h"
#include "proxy/base/status.h"
#include "proxy/base/trace_track.h"

namespace jax_ep {

// Splits [0, num_items) over the threads that this rank may use and returns when all are done.
// Always callable; with one thread it runs `body(0, num_items)` inline.
using ParallelFor = std::function<void(
    int64_t num_items, const std::function<void(int64_t begin, int64_t end)>& body)>;

// Totals since creation, read by Group.stats(). Written by the rank's executor only (relaxed).
struct RankCounters {
  std::atomic<uint64_t> plans, dispatches, combines;  // calls completed (LL included)
  std::atomic<uint64_t> rows_received,
      rows_dropped;                    // rows placed; this rank's (t, k) pairs dropped
  std::atomic<uint64_t> bytes_pulled;  // by HT dispatches, from node-mates (memory or heap)
  // Once per (token, node), in LL per (token, rank).
  std::atomic<uint64_t> rows_sent_internode, bytes_sent_internode;
  std::atomic<uint64_t> wait_ns;        // time spent waiting for peers
  std::atomic<uint64_t> last_overflow;  // 1 if the newest plan overflowed
  std::atomic<uint64_t> invalid_ids;    // expert ids >= num_experts seen in plans
  // By local expert of the group, or of a view of it: pairs that plans (PlanParams.counts_load)
  // have given it.
  std::vector<std::atomic<uint64_t>> pairs_per_expert;
  // wait_ns by (WaitPhase, rank waited for): [kNumWaitPhases * N].
  std::vector<std::atomic<uint64_t>> wait_by_peer;

  // Before the rank's first call.
  void Allocate(const GroupShape& shape) {
    pairs_per_expert = std::vector<std::atomic<uint64_t>>(shape.experts_per_rank());
    wait_by_peer = std::vector<std::atomic<uint64_t>>(size_t{kNumWaitPhases} * shape.num_ranks);
  }
  void AddWait(WaitPhase phase, uint32_t peer, uint64_t ns) {
    wait_ns.fetch_add(ns, std::memory_order_relaxed);
    const size_t num_ranks = wait_by_peer.size() / kNumWaitPhases;
    if (peer >= num_ranks) return;  // not allocated
    wait_by_peer[static_cast<size_t>(phase) * num_ranks + peer].fetch_add(
        ns, std::memory_order_relaxed);
  }
};

// One rank of one team: built once by the session, then used by that rank's executor alone.
// Pointers must outlive it.
struct Rank {
  std::string group_name;  // for messages
  GroupShape shape;        // of the group, but for what TakeSizes has set
  HeapLayout layout;       // of the group
  uint32_t rank = 0;
  TeamId team = {};  // for messages
  // Indexed by rank. Node-mates (self included): base of their heap as mapped here. Others:
  // nullptr.
  std::vector<std::byte*> heaps;
  // Indexed by rank: that node-mate lives in this process, so its XLA buffers can be read in place.
  std::vector<bool> in_process;
  // Indexed by rank: 0 for a rank that the group goes on without (Group.agree). It has no heap
  // here, no signal goes to it or is awaited from it, and no plan may name it. Empty: all take
  // part, and ids are not masked.
  std::vector<uint8_t> active;
  uint32_t generation = 0;  // SessionOptions::generation
  // Null in a group of one node. Commands to other nodes go here; the proxy is kicked after a
  // batch.
  RingView ring;
  ProxyPort* proxy = nullptr;
  FailureLatch* failure = nullptr;
  std::chrono::nanoseconds timeout{};  // Config.timeout_s: bound of each operation's waits
  ParallelFor parallel_for;
  bool uses_huge_pages = true;       // hint for large results (cpu/huge_pages.h)
  bool refuses_invalid_ids = false;  // a plan that meets expert ids >= E fails the group
  RankCounters* counters = nullptr;
  TraceTrack* trace = nullptr;  // null unless JAX_EP_TRACE is set
  // For tests of who hangs: before its first signal on `channel`, this rank stands for `time`.
  struct Stall {
    Channel channel = Channel::kOrder;
    std::chrono::nanoseconds time{};
  } stall = {};
  // Epochs of the newest call of each kind that this rank has begun / finished (0 = none).
  struct Epochs {
    uint64_t plan = 0;
    uint64_t dispatch_started = 0, dispatch_done = 0;
    uint64_t combine_started = 0, combine_done = 0;
    uint64_t ll_dispatch_started = 0, ll_dispatch_done = 0;
    uint64_t ll_combine_started = 0, ll_combine_done = 0;
    // Rounds made, of the kinds that are split (Rounds).
    uint64_t dispatch_rounds = 0, combine_rounds = 0;
    uint64_t ll_dispatch_rounds = 0, ll_combine_rounds = 0;
  } epochs;

  // Who holds each slot set of a kind. A call takes a set that no open start holds, so whole calls
  // may run between a start and its done, and dones may come in any order. Every rank executes the
  // same calls in the same order, hence all choose the same set. `done_seq` numbers the dones of a
  // kind (it is what the *Done flags carry): the set may be written again when every reader has
  // reached it.
  struct SlotSet {
    uint64_t epoch = 0;     // newest call that used the set
    uint64_t done_seq = 0;  // its number among the dones
    bool open = false;      // begun, not yet done
    // What the start of a split kind was given: its done makes the whole call.
    int64_t num_tokens = 0, recv_rows = 0;  // of that start
    std::unique_ptr<std::byte[]> rows;
    std::vector<float> weights, pair_scalars;
  };
  using SlotSets = std::array<SlotSet, kMaxDepth>;
  SlotSets dispatch_sets, combine_sets, ll_dispatch_sets, ll_combine_sets;

  // Working memory of the kernels, grown on demand, kept between calls.
  std::vector<int32_t> scratch;

  // Before each call, by the executor: what the call may have other than the group (Group.view).
  // Nobody else reads these four.
  void TakeSizes(const GroupShape& call) {
    shape.num_experts = call.num_experts;
    shape.top_k = call.top_k;
    shape.align = call.align;
    shape.hidden = call.hidden;
  }

  std::string NameOf(uint32_t other) const { return RankName(team, other); }
  uint32_t node() const { return rank / shape.node_size; }
  uint32_t local_rank() const { return rank % shape.node_size; }
  uint32_t node_begin() const { return node() * shape.node_size; }  // first rank of this node
  bool is_active(uint32_t other) const { return active.empty() || active[other] != 0; }
  // The first active rank of that node; num_ranks if it has none.
  uint32_t leader_of(uint32_t any_node) const {
    for (uint32_t local = 0; local < shape.node_size; ++local) {
      const uint32_t other = any_node * shape.node_size + local;
      if (is_active(other)) return other;
    }
    return shape.num_ranks;
  }
  uint32_t leader() const { return leader_of(node()); }
};

// A pair whose expert e lives on an inactive rank has this id + e instead of e: no expert, but the
// kernels see by which mask it was left out (jax_ep/_ops/reachable.py).
inline constexpr int32_t kUnreachable = INT32_MIN;

// The arrays of a jax_ep.Plan on this rank (shapes: api.md "Operations"). T tokens, K = top_k,
// E_l local experts, N ranks, R receive rows.
struct PlanOutputs {
  std::span<int32_t> group_sizes;    // [E_l]
  std::span<int32_t> group_counts;   // [E_l]
  std::span<int32_t> send_slot;      // [T * K]
  std::span<int32_t> recv_src;       // [R]
  std::span<int32_t> send_counts;    // [N]
  std::span<int32_t> recv_counts;    // [N]
  int32_t* num_dropped = nullptr;    // []
  int32_t* overflow = nullptr;       // []
  std::span<int32_t> recv_topk_idx;  // [N * T * K] in rank_major, else empty
};

struct PlanParams {
  Mode mode = Mode::kHt;
  Layout layout = Layout::kExpertMajor;
  // The call's name in its program (xla_ffi/site.h): its upper half is the lowered program's, equal
  // on all processes, 0 if not known. GPUs compare that with their peers' and name the call in
  // reports; CPUs execute calls in an order that is agreed by name.
  uint64_t site = 0;
  int64_t num_tokens = 0;   // T, equal on all ranks of one call
  int64_t recv_rows = 0;    // R
  bool counts_load = true;  // false: its pairs are no tokens, pairs_per_expert leaves them out
  // [T * K]; negative: no expert (kUnreachable + e: see there); >= E: dropped and counted.
  std::span<const int32_t> topk_idx;
  PlanOutputs out;
};

// Rows of a dispatch that travel as FP8 records (docs/semantics.md, "FP8 rows"): the source
// quantises x, and what arrives is dequantised, or delivered in two arrays. On GPUs only, in whole
// calls within one node, without y and row_weights, with blocks of 16 * 2^i elements, up to 512.
// Elsewhere the caller quantises, and records are opaque rows.
struct Fp8Wire {
  uint32_t block = 0;  // elements that share a scale; 0: rows travel as they are
  Fp8Scale scale = Fp8Scale::kF32;
  // Null: recv_x gets rows [R, H] of elem_type. Else it gets values u8 [R, H], and this the scales:
  // [R, H / block], or with scales_in_columns the last two axes of [..., R', H / block] exchanged,
  // where the layout's last axis of rows is R'.
  std::byte* recv_scales = nullptr;
  bool scales_in_columns = false;

  bool operator==(const Fp8Wire&) const = default;
};

// Rows to experts, following a plan. With `y` and `row_weights` it is the backward of a weighted
// combine: recv_x[r] = row_weights[r] * x[src(r)] and recv_dots[r] = <x[src(r)], y[r]> (f32 sums).
struct DispatchParams {
  Mode mode = Mode::kHt;
  Layout layout = Layout::kExpertMajor;
  uint64_t site = 0;  // as in PlanParams
  bool zero_padding = true;
  int64_t num_tokens = 0;          // T
  int64_t recv_rows = 0;           // R
  const std::byte* x = nullptr;    // [T, H] of shape.elem_type; null when hidden rows are absent
  std::span<const float> weights;  // [T * K], empty when absent
  std::span<const int32_t> send_slot;      // [T * K] of the plan
  std::span<const int32_t> recv_src;       // [R] of the plan
  std::span<const int32_t> recv_topk_idx;  // [N * T * K] in rank_major with weights, else empty
  const std::byte* y = nullptr;            // [R, H], null when absent
  std::span<const float> row_weights;      // [R], empty when absent (= 1)
  std::byte* recv_x = nullptr;             // [R, H], null when x is
  std::span<float> recv_weights;           // [R]; rank_major [N * T * K]; empty when weights are
  std::span<float> recv_dots;              // [R], empty when y is absent
  Fp8Wire wire = {};
};

// LL plan and dispatch in one exchange: PlanParams.topk_idx routes, DispatchParams.send_slot and
// recv_src are ignored (the plan outputs take their place).
struct LlDispatchParams {
  PlanParams plan;
  DispatchParams dispatch;
};

// Rows back to their tokens, summed in the fixed order of docs/semantics.md.
struct CombineParams {
  Mode mode = Mode::kHt;
  Layout layout = Layout::kExpertMajor;
  uint64_t site = 0;                   // as in PlanParams
  int64_t num_tokens = 0;              // T
  int64_t recv_rows = 0;               // R
  const std::byte* y = nullptr;        // [R, H] of shape.elem_type; null when absent
  std::span<const float> row_weights;  // [R], empty = 1
  // One f32 per row ([R]; rank_major [R * K]) that travels back to pair_scalars_out[t, k]; empty
  // when absent.
  std::span<const float> pair_scalars;
  std::span<const int32_t> send_slot;  // [T * K] of the plan
  std::span<const int32_t> recv_src;   // [R] of the plan
  std::byte* out = nullptr;            // [T, H], null when y is
  std::span<float> pair_scalars_out;   // [T * K], zero where a pair was dropped or absent
};

// Each launcher runs one call of this rank to its end on the calling thread: it blocks, bounded by
// rank.timeout and the failure latch, and must be called in the agreed order on every rank of the
// team. On error the outputs are unspecified, the latch is set, and later calls fail at once.
Status RunPlan(Rank& rank, const PlanParams& params);
Status RunDispatch(Rank& rank, const DispatchParams& params);
Status RunLlDispatch(Rank& rank, const LlDispatchParams& params);
Status RunCombine(Rank& rank, const CombineParams& params);

// Halves. Start copies or sends everything that it reads before it returns, so the caller's buffers
// may go; it writes its epoch to *epoch, which Done must get back. At most shape.depth starts of a
// kind may be open; one more is kFailedPrecondition. Done reads none of x, weights, y, row_weights
// and pair scalars, except that the fused backward (y) exists in whole calls only.
Status StartDispatch(Rank& rank, const DispatchParams& params, uint64_t* epoch);
Status FinishDispatch(Rank& rank, const DispatchParams& params, uint64_t epoch);
Status StartLlDispatch(Rank& rank, const LlDispatchParams& params, uint64_t* epoch);
Status FinishLlDispatch(Rank& rank, const LlDispatchParams& params, uint64_t epoch);
Status StartCombine(Rank& rank, const CombineParams& params, uint64_t* epoch);
Status FinishCombine(Rank& rank, const CombineParams& params, uint64_t epoch);

}  // namespace jax_ep
