// RunPlan: the HT exchange of counts and routing records. In mode LL the LL dispatch does it.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cpu/ll_dispatch.h"
#include "kernels/cpu/plan_tables.h"
#include "kernels/cpu/sync.h"
#include "kernels/launch.h"

namespace jax_ep {
namespace {

// First 16 bytes of a counts block; counts [E] follow. The fields beyond the first must be equal on
// all ranks: a difference means that the ranks do not run the same call.
struct PlanHeader {
  int32_t num_locally_dropped;
  int32_t num_tokens;
  int32_t recv_rows;
  int32_t layout;
};
static_assert(sizeof(PlanHeader) == kWireUnitBytes);

PlanHeader HeaderOf(const PlanParams& params) {
  return {.num_locally_dropped = 0,
          .num_tokens = static_cast<int32_t>(params.num_tokens),
          .recv_rows = static_cast<int32_t>(params.recv_rows),
          .layout = static_cast<int32_t>(params.layout)};
}

// Counts block and this rank's segment to each rank of the other nodes, then the signals.
Status SendRouting(Operation& op, uint32_t set) {
  const TracePhase phase(op.rank().trace, "send routing");
  const GroupShape& shape = op.shape();
  const HeapLayout& layout = op.layout();
  const uint64_t block = layout.plan_send.At(set);
  const auto* counts = HeapAt<int32_t>(op.own_heap(), block + sizeof(PlanHeader));
  const std::vector<uint64_t> starts = SegmentStarts(shape, counts);
  for (uint32_t peer = 0; peer < shape.num_ranks; ++peer) {
    if (op.is_mate(peer) || !op.is_active(peer)) continue;
    uint64_t num_codes = 0;
    for (uint32_t e = 0; e < shape.experts_per_rank(); ++e) {
      num_codes += static_cast<uint64_t>(counts[peer * shape.experts_per_rank() + e]);
    }
    Command command{};
    command.op = num_codes == 0 ? Op::kWriteSignal : Op::kWrite;
    command.dst_rank = peer;
    command.length_bytes = layout.plan_counts_bytes;
    command.local_offset = block;
    command.remote_offset = layout.plan_recv.At(set, op.rank().rank);
    command.channel = Channel::kPlan;
    command.epoch = op.epoch();
    JAX_EP_RETURN_IF_ERROR(op.Push(command));
    const uint64_t code_bytes = AlignUp(num_codes * sizeof(int32_t), kWireUnitBytes);
    for (uint64_t sent = 0; sent < code_bytes;) {
      const uint64_t length = std::min(code_bytes - sent, kMaxCommandBytes);
      command.op = sent + length == code_bytes ? Op::kWriteSignal : Op::kWrite;
      command.length_bytes = length;
      command.local_offset =
          block + layout.plan_counts_bytes + starts[peer] * sizeof(int32_t) + sent;
      command.remote_offset =
          layout.plan_recv.At(set, op.rank().rank) + layout.plan_counts_bytes + sent;
      JAX_EP_RETURN_IF_ERROR(op.Push(command));
      sent += length;
    }
  }
  op.KickProxy();
  return op.SignalMates(Channel::kPlan, op.epoch());
}

// Where `source`'s record is: in its own heap if it is a node-mate, else where it was sent.
Result<SourceRouting> RoutingOf(Operation& op, const PlanParams& params, uint32_t set,
                                uint32_t source) {
  const GroupShape& shape = op.shape();
  const HeapLayout& layout = op.layout();
  const bool is_mate = op.is_mate(source);
  std::byte* heap = is_mate ? op.heap(source) : op.own_heap();
  const uint64_t block = is_mate ? layout.plan_send.At(set) : layout.plan_recv.At(set, source);
  PlanHeader header;
  std::memcpy(&header, heap + block, sizeof(header));
  SourceRouting routing{
      .counts = HeapAt<int32_t>(heap, block + sizeof(PlanHeader)),
      .codes = HeapAt<int32_t>(heap, block + layout.plan_counts_bytes),
      .num_locally_dropped = header.num_locally_dropped,
  };
  if (is_mate) routing.codes += SegmentStarts(shape, routing.counts)[op.rank().rank];
  PlanHeader expected = HeaderOf(params);
  expected.num_locally_dropped = header.num_locally_dropped;
  if (std::memcmp(&header, &expected, sizeof(header)) != 0 ||
      !IsRoutingInRange(shape, op.rank().rank, params.num_tokens * shape.top_k, routing)) {
    return op.Fail(FailedPrecondition(
        op.rank().NameOf(source) +
        " runs another plan: got T = " + std::to_string(header.num_tokens) +
        ", R = " + std::to_string(header.recv_rows) + ", layout " + std::to_string(header.layout) +
        ", expected T = " + std::to_string(expected.num_tokens) +
        ", R = " + std::to_string(expected.recv_rows) + ", layout " +
        std::to_string(expected.layout) + "; all ranks must run the same program"));
  }
  return routing;
}

Status RunHtPlan(Rank& rank, const PlanParams& params) {
  Operation op(rank, "plan");
  op.set_epoch(++rank.epochs.plan);
  JAX_EP_RETURN_IF_ERROR(op.CheckLatch());
  const GroupShape& shape = rank.shape;
  JAX_EP_RETURN_IF_ERROR(op.Require(CheckPlanParams(shape, params)));
  JAX_EP_RETURN_IF_ERROR(CheckIds(op, params.topk_idx));
  const auto set = static_cast<uint32_t>(op.epoch() % shape.depth);
  if (op.epoch() > shape.depth) {
    JAX_EP_RETURN_IF_ERROR(op.WaitAll(Channel::kPlanDone, op.epoch() - shape.depth));
  }
  const uint64_t block = rank.layout.plan_send.At(set);
  int32_t* codes = HeapAt<int32_t>(op.own_heap(), block + rank.layout.plan_counts_bytes);
  const LocalDrops drops =
      SortPairs(shape, params.layout, params.topk_idx,
                HeapAt<int32_t>(op.own_heap(), block + sizeof(PlanHeader)), codes);
  PlanHeader header = HeaderOf(params);
  header.num_locally_dropped = drops.num_dropped;
  std::memcpy(op.own_heap() + block, &header, sizeof(header));
  JAX_EP_RETURN_IF_ERROR(SendRouting(op, set));

  JAX_EP_RETURN_IF_ERROR(op.WaitAll(Channel::kPlan, op.epoch()));
  const TracePhase phase(rank.trace, "assign rows");
  const std::vector<int32_t> no_pairs(shape.num_experts, 0);
  std::vector<SourceRouting> sources(shape.num_ranks, {.counts = no_pairs.data()});
  for (uint32_t source = 0; source < shape.num_ranks; ++source) {
    if (!op.is_active(source)) continue;
    JAX_EP_ASSIGN_OR_RETURN(sources[source], RoutingOf(op, params, set, source));
  }
  BuildPlan(shape, rank.rank, params, sources, codes);
  JAX_EP_RETURN_IF_ERROR(op.SignalAll(Channel::kPlanDone, op.epoch()));
  CountPlan(rank, params, drops);
  return Status::Ok();
}

}  // namespace

Status RunPlan(Rank& rank, const PlanParams& params) {
  return params.mode == Mode::kLl ? RunLlPlan(rank, params) : RunHtPlan(rank, params);
}

}  // namespace jax_ep
