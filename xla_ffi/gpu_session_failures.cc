// Failures of a GpuSession: what kernels and mates report becomes the session's, and in words.
#include <optional>

#include "proxy/base/log.h"
#include "xla_ffi/gpu_member.h"

namespace jax_ep {
namespace {

constexpr auto kWatchPeriod = std::chrono::milliseconds(2);
// A rank leaves when its devices are idle, so whatever it took part in runs here already, and ends
// long before this. What still waits then waits for the rank that has left.
constexpr auto kDepartureGrace = std::chrono::seconds(5);

const char* Name(gpu::Operation operation) {
  switch (operation) {
    case gpu::Operation::kPlan:
      return "plan";
    case gpu::Operation::kDispatch:
      return "dispatch";
    case gpu::Operation::kCombine:
      return "combine";
    case gpu::Operation::kLlDispatch:
      return "dispatch (ll)";
    case gpu::Operation::kLlCombine:
      return "combine (ll)";
    case gpu::Operation::kDispatchStart:
      return "dispatch_start";
    case gpu::Operation::kDispatchDone:
      return "dispatch_done";
    case gpu::Operation::kCombineStart:
      return "combine_start";
    case gpu::Operation::kCombineDone:
      return "combine_done";
    case gpu::Operation::kLlDispatchStart:
      return "dispatch_start (ll)";
    case gpu::Operation::kLlDispatchDone:
      return "dispatch_done (ll)";
    case gpu::Operation::kLlCombineStart:
      return "combine_start (ll)";
    case gpu::Operation::kLlCombineDone:
      return "combine_done (ll)";
  }
  return "an unknown operation";
}

}  // namespace

// Device failures become the session's, the session's (a dead process, say) end the kernels' waits.
void GpuSession::WatchStatus() {
  bool aborted = false;
  std::optional<std::chrono::steady_clock::time_point> left_at;
  std::unique_lock lock(watch_mutex_);
  while (!stopping_) {
    for (const auto& member : members_) {
      if (failure_->failed()) break;
      if (member->status->failed.load(std::memory_order_acquire) != 0 &&
          failure_->Set(Unavailable(Describe(*member)), BlamedFor(*member))) {
        LogError(failure_->status().message());
      }
    }
    const auto now = std::chrono::steady_clock::now();
    if (!left_at.has_value() && FindDeparted().has_value()) left_at = now;
    // Ends waits for a rank that has left; without such a wait nothing fails.
    const bool waits_in_vain = left_at.has_value() && now - *left_at > kDepartureGrace;
    if (!aborted && (failure_->failed() || waits_in_vain)) {
      for (const auto& member : members_) {
        member->status->abort.store(1, std::memory_order_release);
      }
      aborted = true;
    }
    watch_wake_.wait_for(lock, kWatchPeriod);
  }
}

std::string GpuSession::Describe(const Member& member) const {
  const gpu::RankStatus& status = *member.status;
  const auto operation = static_cast<gpu::Operation>(status.operation);
  std::string text = "group " + options().name + ": " + Name(operation) + " number " +
                     std::to_string(status.epoch) + " on " + options().NameOf(member.id);
  const std::string peer = options().NameOf(member.id.team, status.peer);
  const double seconds =
      std::chrono::duration_cast<std::chrono::duration<double>>(options().timeout).count();
  switch (static_cast<gpu::FailureKind>(status.kind)) {
    case gpu::FailureKind::kTimeout:
      return text + ": " + peer + " did not arrive within " + std::to_string(seconds) +
             " s (waited for " + std::to_string(status.expected) + ", saw " +
             std::to_string(status.actual) + ")";
    case gpu::FailureKind::kPeerFailed:
      return text + ": " + peer + " failed first; its own message says why";
    case gpu::FailureKind::kAborted:
      if (const auto left = FindDeparted(); left.has_value()) return left->status.message();
      return text + " was ended because the group had failed";
    case gpu::FailureKind::kBusy:
      return text +
             ": another call of the group was running on this device; calls of one group must not "
             "run at the same time (concurrent command buffers, compute_on streams)";
    case gpu::FailureKind::kWrongOrder:
      return text + ": " + peer +
             " is in another operation, or in a call of another program (value " +
             std::to_string(status.actual) + ", expected " + std::to_string(status.expected) +
             "); all ranks must run the same programs in the same order, which several threads "
             "that "
             "use one group do not promise";
    case gpu::FailureKind::kTooManyOpen:
      return text + ": more than max_in_flight starts before a done";
    case gpu::FailureKind::kStaleEpoch:
      return text +
             ": its *_start ran twice or not at all, under remat for instance: the slot set holds "
             "epoch " +
             std::to_string(status.actual) + ", expected " + std::to_string(status.expected);
    case gpu::FailureKind::kInvalidId:
      return text + " got expert id(s) of num_experts or more (JAX_EP_DEBUG=1); fix the router";
    case gpu::FailureKind::kRingFull:
      return text + ": this rank's proxy took no command for " + std::to_string(seconds) +
             " s; its network is stuck (dump_state says where)";
    case gpu::FailureKind::kBadCommand:
      return text + ": a command to " + peer +
             " does not fit the ring's format; this is a fault of "
             "jax_ep, please report it";
    case gpu::FailureKind::kNotLaunched:
      return text + ": one of its kernels could not be launched; the error of that call says why";
    case gpu::FailureKind::kNone:
      break;
  }
  return text + " failed without a reason";
}

int64_t GpuSession::BlamedFor(const Member& member) const {
  if (static_cast<gpu::FailureKind>(member.status->kind) != gpu::FailureKind::kAborted) {
    return FailureLatch::kNobody;  // a late rank is named, and blamed by nobody
  }
  const auto left = FindDeparted();
  return left.has_value() ? left->blamed : FailureLatch::kNobody;
}

std::optional<GpuSession::Departed> GpuSession::FindDeparted() const {
  for (const auto& member : members_) {
    for (const MonitorOptions::Peer& mate : member->watched) {
      // Acquire pairs with the release in Monitor::Leave.
      if (mate.control->state.load(std::memory_order_acquire) != MemberState::kClosed) continue;
      return Departed{
          .blamed = RankOfTeam(mate.team, mate.rank),
          .status = PeerHasLeft(options().name, options().NameOf(mate.team, mate.rank),
                                mate.control->departure.load(std::memory_order_relaxed))};
    }
  }
  return std::nullopt;
}

}  // namespace jax_ep
