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

// Pushes `num_bytes` to `command`'s peer, the signal with the last of them.
Status PushAll(Operation& op, Command command, uint64_t num_bytes) {
  while (num_bytes > 0) {
    command.length_bytes = std::min(num_bytes, kMaxCommandBytes);
    num_bytes -= command.length_bytes;
    command.op = num_bytes == 0 ? Op::kWriteSignal : Op::kWrite;
    JAX_EP_RETURN_IF_ERROR(op.Push(command));
    command.local_offset += command.length_bytes;
    command.remote_offset += command.length_bytes;
  }
  return Status::Ok();
}

// One rank of each other node, that of equal local index, gets what all of that node needs: the
// counts of all experts, and the codes of the node's experts, which lie side by side.
Status SendRouting(Operation& op, uint32_t set) {
  const TracePhase phase(op.rank().trace, "send routing");
  const GroupShape& shape = op.shape();
  const HeapLayout& layout = op.layout();
  const Rank& rank = op.rank();
  const uint64_t block = layout.plan_send.At(set);
  const std::vector<uint64_t> starts =
      SegmentStarts(shape, HeapAt<int32_t>(op.own_heap(), block + sizeof(PlanHeader)));
  for (uint32_t step = 1; step < shape.num_nodes(); ++step) {
    const uint32_t node = (rank.node() + step) % shape.num_nodes();
    const uint32_t first = node * shape.node_size;
    if (!op.is_active(first + rank.local_rank())) continue;
    const uint64_t begin = starts[first] * sizeof(int32_t);
    const uint64_t end = starts[first + shape.node_size] * sizeof(int32_t);
    Command command{};
    command.op = begin == end ? Op::kWriteSignal : Op::kWrite;
    command.dst_rank = first + rank.local_rank();
    command.length_bytes = layout.plan_counts_bytes;
    command.local_offset = block;
    command.remote_offset = layout.plan_recv.At(set, rank.node());
    command.channel = Channel::kPlan;
    command.epoch = op.epoch();
    JAX_EP_RETURN_IF_ERROR(op.Push(command));
    command.local_offset += layout.plan_counts_bytes + begin;
    command.remote_offset += layout.plan_counts_bytes;
    JAX_EP_RETURN_IF_ERROR(PushAll(op, command, end - begin));
  }
  op.KickProxy();
  return op.SignalMates(Channel::kPlan, op.epoch());
}

// What `source` has sent: in its own heap if it is a node-mate, else where the node received it.
Result<SourceRouting> RoutingOf(Operation& op, const PlanParams& params, uint32_t set,
                                uint32_t source) {
  const GroupShape& shape = op.shape();
  const HeapLayout& layout = op.layout();
  const uint32_t rank = op.rank().rank;
  const bool is_mate = op.is_mate(source);
  std::byte* heap = op.heap(is_mate ? source : op.ReceiverOf(Channel::kPlan, source));
  const uint64_t block =
      is_mate ? layout.plan_send.At(set) : layout.plan_recv.At(set, source / shape.node_size);
  PlanHeader header;
  std::memcpy(&header, heap + block, sizeof(header));
  PlanHeader expected = HeaderOf(params);
  expected.num_locally_dropped = header.num_locally_dropped;
  SourceRouting routing{
      .counts = HeapAt<int32_t>(heap, block + sizeof(PlanHeader)),
      .codes = HeapAt<int32_t>(heap, block + layout.plan_counts_bytes),
      .num_locally_dropped = header.num_locally_dropped,
  };
  const int64_t num_pairs = params.num_tokens * shape.top_k;
  bool is_right = std::memcmp(&header, &expected, sizeof(header)) == 0 &&
                  AreCountsInRange(shape, num_pairs, routing.counts);
  if (is_right) {
    const uint32_t first = is_mate ? 0 : op.rank().node_begin();  // whose segment comes first
    for (uint32_t owner = first; owner < rank; ++owner) {
      routing.codes += SegmentInts(shape, routing.counts, owner);
    }
    is_right = AreCodesInRange(shape, rank, num_pairs, routing);
  }
  if (!is_right) {
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
  const auto set = static_cast<uint32_t>(op.epoch() % kPlanSets);
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
  CountPlan(rank, params, drops);
  return Status::Ok();
}

}  // namespace

Status RunPlan(Rank& rank, const PlanParams& params) {
  return params.mode == Mode::kLl ? RunLlPlan(rank, params) : RunHtPlan(rank, params);
}

}  // namespace jax_ep
