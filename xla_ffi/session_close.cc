// The end of a session: calls end, ranks say good-bye, everything is given back.
#include <algorithm>
#include <optional>
#include <ranges>
#include <thread>

#include "proxy/base/log.h"
#include "xla_ffi/departure.h"
#include "xla_ffi/session_member.h"

namespace jax_ep {
namespace {

// Looks at calls that end soon; nobody rings for them.
constexpr std::chrono::milliseconds kDrainPeriod{1};

}  // namespace

Session::~Session() {
  if (lifecycle_.is_forked()) {
    Leak(members_, watch_, proxy_, monitor_, tracer_);
  } else {
    Close();
  }
}

void Session::CheckFarewells() const {
  const uint64_t epoch = barrier_epoch_.load(std::memory_order_acquire);
  for (const auto& member : members_) {
    const uint64_t needed = member->executor->num_needed();
    if (needed == 0) continue;
    for (uint32_t peer = 0; peer < options_.shape.num_ranks; ++peer) {
      // Where its process signals a barrier: each rank of a node to each other, else the lead.
      std::byte* heap = member->heap.bytes().data();
      uint32_t source = peer;
      if (member->executor->rank().heaps[peer] == nullptr) {
        const auto lead = leads_.find({member->id.team, process_of(member->id.team, peer)});
        if (lead == leads_.end()) continue;  // this very process
        heap = lead->second.member->heap.bytes().data();
        source = lead->second.peer;
      }
      const auto misses = [&](uint64_t num_calls, Departure departure) {
        if (needed <= num_calls) return false;
        Departed left = PeerHasLeft(options_.name, options_.IdOf(member->id.team), peer, departure,
                                    /*user=*/member->id.rank);
        failure_->Set(std::move(left.status), left.blamed);
        return true;
      };
      // A peer that is in a barrier ahead of this process is in its close. Acquire: publishes what
      // it wrote before.
      const auto& flag = layout_.FlagIn(heap, Channel::kBarrier, source);
      if (flag.load(std::memory_order_acquire) > epoch) {
        const auto* const farewell =
            reinterpret_cast<const Farewell*>(heap + layout_.farewell_offset(peer));
        const Departure departure = farewell->departure.load(std::memory_order_relaxed);
        if (misses(farewell->num_calls.load(std::memory_order_relaxed), departure)) return;
      }
      const auto* const agreement =
          reinterpret_cast<const Agreement*>(heap + layout_.agreement_offset(peer));
      const std::optional<uint64_t> num_calls = agreement->Get();
      if (num_calls.has_value() && misses(*num_calls, Departure::kAgrees)) return;
    }
  }
}

Status Session::EndCalls() {
  const auto unbalanced = [this] {
    std::string text = "group " + options_.name +
                       " was closed while a call had reached some ranks of process " +
                       std::to_string(options_.process_index) + " only (";
    for (const auto& member : members_) {
      text += options_.NameOf(member->id) + ": " +
              std::to_string(member->executor->num_enqueued()) + " calls; ";
    }
    return FailedPrecondition(text + "wait for the results before close)");
  };
  const Deadline balance = Deadline::After(options_.peer_timeout);
  while (!IsBalanced()) {
    if (failure_->failed()) return failure_->status();
    if (balance.expired()) return unbalanced();
    std::this_thread::sleep_for(kDrainPeriod);
  }
  const Status refusal = WhyClosed();
  for (const auto& member : members_) member->executor->Refuse(refusal);
  // A call that came in between was taken on some ranks and refused on others: it cannot end.
  if (!IsBalanced()) return unbalanced();
  const Deadline deadline = Deadline::After(options_.timeout);
  for (const auto& member : members_) {
    while (const uint64_t needed = member->executor->num_needed()) {
      if (failure_->failed()) return failure_->status();
      if (deadline.expired()) {
        return DeadlineExceeded("group " + options_.name + " was closed while call " +
                                std::to_string(needed) + " of " + options_.NameOf(member->id) +
                                " ran; it did not end within timeout_s");
      }
      std::this_thread::sleep_for(kDrainPeriod);
    }
  }
  return failure_->status();
}

Status Session::LeaveWithAll(const Member& member, uint64_t offset,
                             const std::function<void(std::byte*)>& write,
                             const Deadline& deadline) const {
  for (std::byte* heap : member.executor->rank().heaps) {
    if (heap != nullptr) write(heap + offset);
  }
  // A lead passes on what all ranks here leave. The signal of a barrier comes behind it.
  const auto is_of_team = [&](const auto& lead) { return lead.first.first == member.id.team; };
  for (const auto& lead : leads_ | std::views::filter(is_of_team)) {
    write(lead.second.member->heap.bytes().data() + offset);
  }
  for (const auto& [_, lead] : leads_ | std::views::filter(is_of_team)) {
    const Rank& from = lead.member->executor->rank();
    JAX_EP_RETURN_IF_ERROR(
        Push(from,
             Command{.op = Op::kWrite,
                     .dst_rank = lead.peer,
                     .length_bytes = kWireUnitBytes,
                     .local_offset = offset,
                     .remote_offset = offset,
                     .channel = Channel::kBarrier,
                     .epoch = barrier_epoch_.load(std::memory_order_relaxed) + 1},
             deadline));
    from.proxy->Kick();
  }
  return Status::Ok();
}

void Session::BeginToAgree() {
  const Lifecycle::Lease lease = lifecycle_.Enter();
  if (!lease || !lifecycle_.is_open() || !started_ || failure_->failed()) return;
  if (!monitor_->ShowAgreement()) return;  // a proxy may be reading what is written below
  const Deadline deadline = Deadline::After(std::min(options_.peer_timeout, options_.timeout));
  for (const auto& member : members_) {
    const uint64_t num_calls = member->executor->num_enqueued();
    const Status told = LeaveWithAll(
        *member, layout_.agreement_offset(member->id.rank),
        [num_calls](std::byte* place) { reinterpret_cast<Agreement*>(place)->Set(num_calls); },
        deadline);
    if (told.ok()) continue;
    LogWarning("group " + options_.name + ": agree: the others were not told: " + told.message());
    return;
  }
}

Status Session::SayGoodbye(Departure departure) {
  const Deadline deadline = Deadline::After(options_.timeout);
  for (const auto& member : members_) {
    const uint64_t num_calls = member->executor->num_executed();
    JAX_EP_RETURN_IF_ERROR(LeaveWithAll(
        *member, layout_.farewell_offset(member->id.rank),
        [&](std::byte* place) {
          auto* const farewell = reinterpret_cast<Farewell*>(place);
          farewell->num_calls.store(num_calls, std::memory_order_relaxed);
          farewell->departure.store(departure, std::memory_order_relaxed);
        },
        deadline));
  }
  monitor_->Leave(departure);
  // A program that has failed or ended is not to linger; who misses it here is told by the
  // farewell.
  return Barrier(departure == Departure::kProgramEnded
                     ? std::min(options_.peer_timeout, options_.timeout)
                     : options_.timeout);
}

void Session::Close(Departure departure) {
  if (!lifecycle_.BeginClose()) return;
  if (started_) {
    if (Status ended = EndCalls(); !ended.ok() && failure_->Set(ended)) {
      LogError(ended.message());  // and whoever waits for those calls is woken
    }
    last_failure_ = failure_->status();
    is_leaving_.store(true, std::memory_order_release);
    if (!failure_->failed()) {
      const Status all_left = SayGoodbye(departure);
      if (failure_->blamed_rank() == FailureLatch::kAgreement) {
        LogInfo("group " + options_.name +
                " was closed while others agree anew: they go on without this process");
      } else if (!all_left.ok()) {
        LogWarning("group " + options_.name +
                   " was closed without waiting for all ranks: " + all_left.message());
      }
    }
    last_flows_ = flow_stats();
  }
  lifecycle_.Seal();
  const Status late = WhyClosed();
  for (const auto& member : members_) {
    if (member->executor != nullptr) member->executor->Stop(late);
  }
  if (proxy_ != nullptr) proxy_->Stop();
  if (monitor_ != nullptr) monitor_->Stop();
  monitor_.reset();
  proxy_.reset();  // before the memory that it has registered
  leads_.clear();
  members_.clear();
  watch_.reset();
  tracer_.reset();
  lifecycle_.EndClose();
}

}  // namespace jax_ep
