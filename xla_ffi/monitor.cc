#include "xla_ffi/monitor.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "proxy/abi/command.h"
#include "proxy/base/descriptor.h"
#include "proxy/base/doorbell.h"
#include "proxy/base/rank_name.h"
#include "proxy/base/thread.h"
#include "proxy/blame.h"
#include "xla_ffi/elsewhere.h"

namespace jax_ep {
namespace {

// Heartbeats per peer_timeout: a few may be lost to a busy machine without a false alarm.
constexpr int kBeatsPerTimeout = 20;
constexpr std::chrono::milliseconds kMaxBeatPeriod{100};

std::string Seconds(std::chrono::nanoseconds time) {
  return std::to_string(std::chrono::duration<double>(time).count()).substr(0, 5) + " s";
}

constexpr std::string_view kFailedFirst = " failed first: ";

}  // namespace

std::string ShownFailure(const std::string& group_name, std::string_view message, size_t limit) {
  const std::string prefix = "group " + group_name + ": ";
  if (message.starts_with(prefix)) message.remove_prefix(prefix.size());
  if (message.size() <= limit) return std::string(message);
  constexpr std::string_view kCut = " [...] ";
  const size_t head = (limit - kCut.size()) / 3;
  const size_t tail = limit - kCut.size() - head;
  return std::string(message.substr(0, head)) + std::string(kCut) +
         std::string(message.substr(message.size() - tail));
}

std::string FailedFirst(const std::string& group_name, const std::string& rank_name,
                        std::string_view shown) {
  const std::string group = "group " + group_name + ": ";
  // Passed on already: the rank that failed first stands there.
  const size_t passed_on = shown.find(kFailedFirst);
  const bool names_first =
      passed_on != std::string_view::npos && IsRankName(shown.substr(0, passed_on));
  if (names_first) return group + std::string(shown);
  return group + rank_name + std::string(kFailedFirst) + std::string(shown);
}

struct Monitor::Watched {
  MonitorOptions::Peer peer;  // constant, as is pidfd
  Descriptor pidfd;  // -1: the kernel or the namespace does not give one; heartbeats still work

  bool HasEnded() const {
    pollfd exited{.fd = pidfd.fd(), .events = POLLIN, .revents = 0};
    return pidfd.fd() >= 0 && poll(&exited, 1, 0) == 1 && (exited.revents & POLLIN) != 0;
  }
  uint64_t last_beat = 0;
  std::chrono::steady_clock::time_point last_change;
};

Monitor::Monitor(MonitorOptions options, FailureLatch* failure)
    : options_(std::move(options)),
      failure_(failure),
      exception_(Internal("group " + options_.group_name +
                          ": the monitor met an exception (out of memory?)")) {
  for (const MonitorOptions::Peer& peer : options_.peers) {
    const long pidfd = syscall(SYS_pidfd_open, static_cast<pid_t>(peer.pid), 0);
    watched_.push_back({.peer = peer, .pidfd = Descriptor(static_cast<int>(pidfd))});
  }
}

Result<std::unique_ptr<Monitor>> Monitor::Create(MonitorOptions options, FailureLatch* failure) {
  std::unique_ptr<Monitor> monitor(new Monitor(std::move(options), failure));
  JAX_EP_ASSIGN_OR_RETURN(monitor->thread_,
                          StartThread("jax_ep monitor", [m = monitor.get()] { m->Loop(); }));
  return monitor;
}

Monitor::~Monitor() { Stop(); }

void Monitor::Leave(Departure departure) {
  has_left_.store(true, std::memory_order_release);
  const bool ends_to_agree = failure_->blamed_rank() == FailureLatch::kAgreement;
  for (ControlBlock* const control : options_.own) {
    const bool shows_agreement =
        control->departure.load(std::memory_order_relaxed) == Departure::kAgrees;
    if (!ends_to_agree || !shows_agreement) {
      control->departure.store(departure, std::memory_order_relaxed);
    }
    MemberState running = MemberState::kRunning;
    // Release: publishes the departure.
    control->state.compare_exchange_strong(running, MemberState::kClosed, std::memory_order_release,
                                           std::memory_order_relaxed);
  }
}

bool Monitor::ShowAgreement() {
  bool is_new = false;
  for (ControlBlock* const control : options_.own) {
    is_new |= control->departure.exchange(Departure::kAgrees, std::memory_order_relaxed) !=
              Departure::kAgrees;
  }
  return is_new;
}

void Monitor::Stop() {
  stopping_.store(true, std::memory_order_release);
  wake_.Ring();
  if (!thread_.joinable()) return;
  thread_.join();
  Publish();
  if (!has_left_.load(std::memory_order_relaxed)) Leave(Departure::kClosed);
}

bool Monitor::HasEnded(uint64_t pid) const {
  const auto it = std::find_if(watched_.begin(), watched_.end(),
                               [&](const Watched& each) { return each.peer.pid == pid; });
  return it != watched_.end() && it->HasEnded();
}

void Monitor::Publish() {
  if (published_ || has_left_.load(std::memory_order_acquire) || !failure_->failed()) return;
  const std::string text =
      ShownFailure(options_.group_name, failure_->message(), kFailureTextBytes - 1);
  published_ = true;
  for (ControlBlock* const control : options_.own) {
    control->blamed_plus_1 = static_cast<uint64_t>(failure_->blamed_rank()) + 1;
    std::memcpy(control->failure_text, text.c_str(), text.size() + 1);
    const bool agrees = failure_->blamed_rank() == FailureLatch::kAgreement;
    // Release: pairs with the acquire in Check; publishes the text.
    control->state.store(agrees ? MemberState::kAgrees : MemberState::kFailed,
                         std::memory_order_release);
    control->doorbell.Ring();
  }
}

void Monitor::Check(Watched& watched, std::chrono::steady_clock::time_point now) {
  const MonitorOptions::Peer& peer = watched.peer;
  const std::string name = RankName({peer.team, options_.num_teams}, peer.rank);
  const std::string who =
      "group " + options_.group_name + ": " + name + " (pid " + std::to_string(peer.pid) + ") ";
  int64_t blamed = RankOfTeam(peer.team, peer.rank);
  const auto fail = [&](const std::string& what) {
    failure_->Set(Unavailable(who + what), blamed);
  };
  switch (peer.control->state.load(std::memory_order_acquire)) {
    case MemberState::kRunning:
      break;
    case MemberState::kFailed: {
      const std::string_view shown(peer.control->failure_text,
                                   strnlen(peer.control->failure_text, kFailureTextBytes));
      const uint64_t culprit = peer.control->blamed_plus_1;
      if (culprit != 0) blamed = static_cast<int64_t>(culprit - 1);
      const std::string by =
          RankName({TeamOf(blamed), options_.num_teams}, static_cast<uint32_t>(blamed));
      // What another rank did ("rank 2 closed it", "rank 2 is gone") is no failure of the peer.
      const bool is_of_another = by != name && shown.starts_with(by + " ");
      failure_->Set(
          Unavailable(is_of_another ? "group " + options_.group_name + ": " + std::string(shown)
                                    : FailedFirst(options_.group_name, name, shown)),
          blamed);
      return;
    }
    case MemberState::kAgrees:
      failure_->Set(FailedPrecondition("group " + options_.group_name + ": " + name +
                                       std::string(kAgreesAnew)),
                    FailureLatch::kAgreement);
      return;
    case MemberState::kClosed:
      return;
  }
  if (watched.HasEnded()) return fail("is gone: its process has ended without closing the group");
  const uint64_t beat = peer.control->heartbeat.load(std::memory_order_relaxed);
  if (beat != watched.last_beat) {
    watched.last_beat = beat;
    watched.last_change = now;
  } else if (now - watched.last_change > options_.peer_timeout) {
    fail("stopped answering: no heartbeat for peer_timeout_s = " + Seconds(options_.peer_timeout) +
         " (stopped, swapped out, or its machine is overloaded)");
  }
}

void Monitor::Round(std::chrono::steady_clock::time_point now) {
  if (!failure_->failed()) {
    for (Watched& entry : watched_) Check(entry, now);
    if (options_.check) options_.check();
  }
  Publish();
}

void Monitor::Loop() noexcept {
  const auto start = std::chrono::steady_clock::now();
  for (Watched& entry : watched_) entry.last_change = start;
  const auto period =
      std::min<std::chrono::nanoseconds>(options_.peer_timeout / kBeatsPerTimeout, kMaxBeatPeriod);
  const FailureLatch never_failed;
  while (!stopping_.load(std::memory_order_acquire)) {
    for (ControlBlock* const control : options_.own) {
      control->heartbeat.fetch_add(1, std::memory_order_relaxed);
      control->activity.elsewhere.store(Elsewhere::Instance().Get(), std::memory_order_relaxed);
      control->activity.beat_ns.store(MonotonicNs(), std::memory_order_relaxed);
    }
    const auto before = std::chrono::steady_clock::now();
    try {
      Round(before);
    } catch (...) {
      // Heartbeats go on, and the next rounds show the mates what happened.
      failure_->Set(std::move(exception_));
    }
    if (failure_->failed()) {
      for (ControlBlock* const control : options_.own) control->doorbell.Ring();
    }
    (void)WaitUntil(
        wake_, [this] { return stopping_.load(std::memory_order_acquire); },
        Deadline::After(period), never_failed);
    // If this thread itself was stopped (SIGSTOP, swap, a suspended VM), the others' clocks are not
    // to blame for what it did not see: give them a fresh start.
    const auto after = std::chrono::steady_clock::now();
    if (after - before > options_.peer_timeout / 2) {
      for (Watched& entry : watched_) entry.last_change = after;
    }
  }
}

}  // namespace jax_ep
