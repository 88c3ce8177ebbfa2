#include "xla_ffi/session.h"

#include <algorithm>

#include "proxy/abi/command.h"
#include "proxy/base/env.h"
#include "xla_ffi/members.h"
#include "xla_ffi/session_member.h"

namespace jax_ep {
Session::Session(SessionOptions options)
    : options_(std::move(options)),
      failure_(std::make_unique<FailureLatch>()),
      layout_(HeapLayout::Make(options_.shape)),
      runs_(options_.name, options_.generation) {}

Result<std::unique_ptr<Session>> Session::Create(SessionOptions options) {
  JAX_EP_RETURN_IF_ERROR(CheckOptions(options));
  JAX_EP_RETURN_IF_ERROR(CheckReach(options, HeapLayout::Make(options.shape).total_bytes));
  std::unique_ptr<Session> session(new Session(std::move(options)));
  JAX_EP_RETURN_IF_ERROR(session->AllocateMembers());
  return session;
}

Status Session::AllocateMembers() {
  const GroupShape& shape = options_.shape;
  const bool one_process = IsOneProcess(options_);
  JAX_EP_ASSIGN_OR_RETURN(const Env env, Env::Read());
  JAX_EP_ASSIGN_OR_RETURN(tracer_, OpenTracer(options_, env));
  if (shape.num_nodes() > 1) {
    JAX_EP_ASSIGN_OR_RETURN(proxy_, Proxy::Create(ProxyOptionsFor(options_, env), failure_.get()));
  }
  for (const LocalRank& local : options_.local_ranks) {
    auto member = std::make_unique<Member>();
    member->id = local;
    JAX_EP_ASSIGN_OR_RETURN(member->heap,
                            SharedMemory::Create(layout_.total_bytes, /*shareable=*/!one_process));
    JAX_EP_ASSIGN_OR_RETURN(member->pool, WorkerPool::Create(options_.threads_per_rank));
    RankCounters& counters =
        *counters_.emplace_back(local, std::make_unique<RankCounters>()).second;
    counters.Allocate(shape);

    auto rank = std::make_unique<Rank>();
    rank->group_name = options_.name;
    rank->shape = shape;
    rank->layout = layout_;
    rank->rank = local.rank;
    rank->team = options_.IdOf(local.team);
    rank->heaps.assign(shape.num_ranks, nullptr);
    rank->in_process.assign(shape.num_ranks, false);
    rank->active = options_.active;
    rank->generation = options_.generation;
    rank->failure = failure_.get();
    rank->timeout = options_.timeout;
    rank->counters = &counters;
    member->trace = AddTrack(tracer_.get(), options_, local, TrackKind::kRank);
    rank->trace = member->trace.get();
    rank->uses_huge_pages = options_.huge_pages;
    rank->refuses_invalid_ids = options_.debug;
    JAX_EP_ASSIGN_OR_RETURN(rank->stall, StallOf(env.stall_spec, local.rank));
    rank->parallel_for = [pool = member->pool.get()](
                             int64_t num_items, const std::function<void(int64_t, int64_t)>& body) {
      pool->Run(num_items, body);
    };
    if (proxy_ != nullptr) {
      std::vector<uint32_t> peers;
      for (uint32_t peer = 0; peer < shape.num_ranks; ++peer) {
        if (peer / shape.node_size != rank->node() && rank->is_active(peer)) peers.push_back(peer);
      }
      std::byte* heap = member->heap.bytes().data();
      JAX_EP_ASSIGN_OR_RETURN(
          member->endpoint,
          proxy_->AddEndpoint(EndpointOptions{
              .rank = local.rank,
              .team = options_.IdOf(local.team),
              .num_ranks = shape.num_ranks,
              .peers = std::move(peers),
              .ll_slots = static_cast<uint32_t>(shape.ll_tokens) + 1,
              .heap = member->heap.bytes(),
              .heap_export = one_process ? std::string() : member->heap.Export(),
              .flag = [heap, layout = layout_](
                          Channel channel,
                          uint32_t source) { return &layout.FlagIn(heap, channel, source); },
              .doorbell = &member->control_block()->doorbell,
              .ring_slots = env.ring_slots,
              .place = PlaceOf(options_, local),
              .trace = AddTrack(tracer_.get(), options_, local, TrackKind::kProxy)}));
      rank->ring = proxy_->ring(member->endpoint);
      rank->proxy = proxy_.get();
    }
    member->rank = std::move(rank);
    members_.push_back(std::move(member));
  }
  return Status::Ok();
}

Status Session::Start() {
  if (proxy_ != nullptr) JAX_EP_RETURN_IF_ERROR(StartProxy());
  JAX_EP_ASSIGN_OR_RETURN(watch_, ContinuationWatch::Create());
  MonitorOptions monitor = MonitorOptionsFor(options_, members_);
  for (const auto& member : members_) {
    auto order = std::make_unique<AgreedOrder>(*member->rank);
    JAX_EP_ASSIGN_OR_RETURN(member->executor, Executor::Create(std::move(member->rank),
                                                               std::move(order), watch_.get()));
  }
  const uint64_t now_ns = MonotonicNs();
  for (const auto& member : members_) {
    member->control_block()->activity.Enter(Phase::kBetweenCalls, now_ns);
  }
  monitor.check = [this] {
    CheckFarewells();
    ReportStalls();
  };
  JAX_EP_ASSIGN_OR_RETURN(monitor_, Monitor::Create(std::move(monitor), failure_.get()));
  started_ = true;
  return Status::Ok();
}

Executor* Session::FindExecutor(int64_t device_ordinal) {
  const Member* const member = FindMemberOn(members_, device_ordinal);
  return member == nullptr ? nullptr : member->executor.get();
}

const LocalRank* Session::FindLocalRank(int64_t device_ordinal) const {
  for (const LocalRank& local : options_.local_ranks) {
    if (local.device_ordinal == device_ordinal) return &local;
  }
  return nullptr;
}

bool Session::IsTeamLocal(int64_t device_ordinal) const {
  const LocalRank* const local = FindLocalRank(device_ordinal);
  if (local == nullptr) return false;
  const auto& processes = options_.team_processes[local->team];
  return std::all_of(processes.begin(), processes.end(),
                     [&](uint32_t process) { return process == options_.process_index; });
}

bool Session::IsBalanced() const {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  if (!lease) return true;
  std::map<uint32_t, uint64_t> num_calls;  // by team
  return std::all_of(members_.begin(), members_.end(), [&](const auto& member) {
    const uint64_t enqueued = member->executor->num_enqueued();
    return num_calls.try_emplace(member->id.team, enqueued).first->second == enqueued;
  });
}

Status Session::FirstFailure() const {
  if (is_leaving_.load(std::memory_order_acquire)) return last_failure_;
  return failure_->status();
}

Status Session::WhyClosed() const {
  const Status failure = FirstFailure();
  return failure.ok() ? GroupWasClosed(options_.name) : failure;
}

uint64_t Session::heap_bytes() const {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  return lease ? layout_.total_bytes * members_.size() : 0;
}

Result<std::vector<RankTotals>> Session::totals() const {
  const auto value = [](const std::atomic<uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  const auto values = [&](const std::vector<std::atomic<uint64_t>>& counters) {
    std::vector<uint64_t> all;
    for (const auto& counter : counters) all.push_back(value(counter));
    return all;
  };
  std::vector<RankTotals> all;
  for (const auto& [id, counters] : counters_) {
    all.push_back({.id = id,
                   .plans = value(counters->plans),
                   .dispatches = value(counters->dispatches),
                   .combines = value(counters->combines),
                   .rows_received = value(counters->rows_received),
                   .rows_dropped = value(counters->rows_dropped),
                   .invalid_ids = value(counters->invalid_ids),
                   .last_overflow = value(counters->last_overflow),
                   .bytes_pulled = value(counters->bytes_pulled),
                   .wait_ns = value(counters->wait_ns),
                   .pairs_per_expert = values(counters->pairs_per_expert),
                   .wait_by_peer = values(counters->wait_by_peer),
                   .rows_sent_internode = value(counters->rows_sent_internode),
                   .bytes_sent_internode = value(counters->bytes_sent_internode)});
  }
  return all;
}

std::string Session::CountersJson() const {
  return ToJson({.name = options_.name,
                 .num_ranks = options_.shape.num_ranks,
                 .failure = FailureText(),
                 .ranks = *totals(),
                 .flows = flow_stats()});
}

std::vector<FlowStats> Session::flow_stats() const {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  if (!lease) return last_flows_;
  return proxy_ == nullptr ? std::vector<FlowStats>() : proxy_->Stats();
}

}  // namespace jax_ep
