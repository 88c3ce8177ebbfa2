// Failures of a GpuSession, and the thread that looks for them: what kernels and mates report
// becomes the session's, and in words.
#include <algorithm>
#include <optional>
#include <utility>

#include "kernels/epoch.h"
#include "proxy/base/deadline.h"
#include "proxy/base/log.h"
#include "xla_ffi/gpu_member.h"
#include "xla_ffi/members.h"

namespace jax_ep {
namespace {

constexpr auto kWatchPeriod = std::chrono::milliseconds(2);
// A rank leaves when its devices are idle, so whatever it took part in runs here already, and ends
// long before this. What still waits then waits for the rank that has left.
constexpr auto kDepartureGrace = std::chrono::seconds(5);
// Within which the monitor learns why a mate has failed, which kernels only learn that it has.
constexpr auto kCauseGrace = std::chrono::seconds(1);

}  // namespace

const char* NameOf(gpu::Operation operation) {
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

// Device failures become the session's, the session's (a dead process, say) end the kernels' waits.
void GpuSession::WatchStatus() noexcept {
  std::unique_lock lock(watch_mutex_);
  std::optional<Deadline> for_cause;
  while (!stopping_) {
    try {
      const bool may_wait = !for_cause.has_value() || !for_cause->expired();
      if (!LatchDeviceFailures(may_wait) && !for_cause.has_value()) {
        for_cause = Deadline::After(kCauseGrace);
      }
    } catch (...) {
      failure_->Set(std::move(exception_));
    }
    const uint64_t now_ns = MonotonicNs();
    for (const auto& member : members_) {
      EndVainWaits(*member);
      ShowWait(*member, now_ns);
      ReadStamps(*member);
    }
    watch_wake_.wait_for(lock, kWatchPeriod);
  }
}

void GpuSession::EndVainWaits(Member& member) const {
  if (member.is_aborted) return;
  const auto now = std::chrono::steady_clock::now();
  if (!member.left_at.has_value() && FindDeparted(member.watched) != nullptr) member.left_at = now;
  // Ends waits for a rank that has left; without such a wait nothing fails.
  const bool waits_in_vain = member.left_at.has_value() && now - *member.left_at > kDepartureGrace;
  if (!failure_->failed() && !waits_in_vain) return;
  member.status->abort.store(1, std::memory_order_release);
  member.is_aborted = true;
}

bool GpuSession::IsCause(const Member& member) {
  const auto kind = static_cast<gpu::FailureKind>(member.status->kind);
  return kind != gpu::FailureKind::kPeerFailed && kind != gpu::FailureKind::kAborted;
}

std::string GpuSession::FailureText() const {
  if (const Lifecycle::Lease lease = lifecycle_.Enter()) {
    const Deadline deadline = Deadline::After(kCauseGrace);
    while (!LatchDeviceFailures(/*may_wait=*/!deadline.expired())) {
      std::this_thread::sleep_for(kWatchPeriod);
    }
  }
  return failure_->status().message();
}

std::string GpuSession::NewestFailureText() const {
  if (const Lifecycle::Lease lease = lifecycle_.Enter()) LatchDeviceFailures(/*may_wait=*/true);
  return failure_->status().message();
}

bool GpuSession::LatchDeviceFailures(bool may_wait) const {
  const auto find = [&](auto&& wanted) -> const Member* {
    const auto it = std::find_if(members_.begin(), members_.end(), [&](const auto& member) {
      return member->status->failed.load(std::memory_order_acquire) != 0 && wanted(*member);
    });
    return it == members_.end() ? nullptr : it->get();
  };
  const Member* first = find([](const Member&) { return true; });
  if (first == nullptr || failure_->failed()) return true;
  // That rank may only have heard of another's failure. A cause is written before anybody hears of
  // it, so that it is found by now.
  if (const Member* cause = find(&IsCause); cause != nullptr) first = cause;
  const auto kind = static_cast<gpu::FailureKind>(first->status->kind);
  if (kind == gpu::FailureKind::kPeerFailed && may_wait) return false;
  if (failure_->Set(Unavailable(Describe(*first)), BlamedFor(*first))) {
    LogError(failure_->message());
  }
  return true;
}

std::string GpuSession::Describe(const Member& member) const {
  const gpu::RankStatus& status = *member.status;
  const auto operation = static_cast<gpu::Operation>(status.operation);
  std::string text = "group " + options().name + ": " + NameOf(operation) + " number " +
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
      if (const auto left = DepartedMateOf(member); left.has_value()) {
        return left->status.message();
      }
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
    case gpu::FailureKind::kStaleEpoch: {
      const auto epoch = static_cast<int32_t>(status.expected);
      if (!IsOfGeneration(epoch, options().generation)) {
        return text + ": got a *_start from before the newest Group.agree; start it again";
      }
      return text +
             ": its *_start ran twice or not at all, under remat for instance: the slot set holds "
             "epoch " +
             std::to_string(status.actual) + ", expected " +
             std::to_string(ExtendEpoch(epoch, status.actual));
    }
    case gpu::FailureKind::kInvalidId:
      return text + " got " + std::to_string(status.actual) +
             " expert id(s) of num_experts or more, expected ids below num_experts (negative: no "
             "expert); fix the router, or unset JAX_EP_DEBUG to have them dropped and counted";
    case gpu::FailureKind::kRingFull:
      return text + ": this rank's proxy took no command for " + std::to_string(seconds) +
             " s; its network is stuck (dump_state says where)";
    case gpu::FailureKind::kBadCommand:
      return text + ": a command to " + peer +
             " does not fit the ring's format; this is a fault of "
             "jax_ep, please report it";
    case gpu::FailureKind::kNotLaunched:
      return text + ": one of its kernels could not be launched; the error of that call says why";
    case gpu::FailureKind::kWrongPosition:
      return "group " + options().name + ": call number " + std::to_string(status.epoch) + " on " +
             options().NameOf(member.id) +
             WrongPositionText(options(), member.id, static_cast<int64_t>(status.actual));
    case gpu::FailureKind::kNotActive: {
      const char* const pass = "; pass the newest result of Group.agree as `active`";
      const std::string without = ", which the group has agreed to go on without";
      switch (static_cast<gpu::Misfit>(status.expected)) {
        case gpu::Misfit::kExpert:
          return text + ": got an expert of " + peer + without + pass;
        case gpu::Misfit::kPlan:
          return text + ": got a plan with rows of " + peer + without + pass + ", and plan anew";
        case gpu::Misfit::kMaskOut:
          return text + ": got a mask without " + peer +
                 ", with which the group has agreed to work" + pass;
      }
      break;
    }
    case gpu::FailureKind::kNone:
      break;
  }
  return text + " failed without a reason";
}

int64_t GpuSession::BlamedFor(const Member& member) const {
  switch (static_cast<gpu::FailureKind>(member.status->kind)) {
    case gpu::FailureKind::kInvalidId:
    case gpu::FailureKind::kNotActive:
    case gpu::FailureKind::kWrongPosition:
      return RankOfTeam(member.id.team, member.id.rank);  // its own program's fault
    case gpu::FailureKind::kAborted:
      break;
    default:
      return FailureLatch::kNobody;  // a late rank is named, and blamed by nobody
  }
  const auto left = DepartedMateOf(member);
  return left.has_value() ? left->blamed : FailureLatch::kNobody;
}

std::optional<Departed> GpuSession::DepartedMateOf(const Member& member) const {
  const MonitorOptions::Peer* const mate = FindDeparted(member.watched);
  if (mate == nullptr) return std::nullopt;
  return PeerHasLeft(options().name, options().IdOf(mate->team), mate->rank,
                     mate->control->departure.load(std::memory_order_relaxed),
                     /*user=*/member.id.rank);
}

std::optional<Departed> GpuSession::FindDepartedMate(int64_t device) const {
  const Member* const member = FindMemberOn(members_, device);
  return member == nullptr ? std::nullopt : DepartedMateOf(*member);
}

}  // namespace jax_ep
