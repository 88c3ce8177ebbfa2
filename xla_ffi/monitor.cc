#include "xla_ffi/monitor.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "proxy/base/doorbell.h"

namespace jax_ep {
namespace {

// Heartbeats per peer_timeout: a few may be lost to a busy machine without a false alarm.
constexpr int kBeatsPerTimeout = 20;
constexpr std::chrono::milliseconds kMaxBeatPeriod{100};

std::string Seconds(std::chrono::nanoseconds time) {
  return std::to_string(std::chrono::duration<double>(time).count()).substr(0, 5) + " s";
}

}  // namespace

struct Monitor::Watched {
  MonitorOptions::Peer peer;
  int pidfd = -1;  // -1: the kernel or the namespace does not give one; heartbeats still work
  uint64_t last_beat = 0;
  std::chrono::steady_clock::time_point last_change;
};

Monitor::Monitor(MonitorOptions options, FailureLatch* failure)
    : options_(std::move(options)), failure_(failure) {
  thread_ = std::thread([this] { Loop(); });
}

Monitor::~Monitor() { Stop(); }

void Monitor::Stop() {
  stopping_.store(true, std::memory_order_release);
  wake_.Ring();
  if (!thread_.joinable()) return;
  thread_.join();
  Publish();
  for (ControlBlock* control : options_.own) {
    MemberState running = MemberState::kRunning;
    control->state.compare_exchange_strong(running, MemberState::kClosed, std::memory_order_release,
                                           std::memory_order_relaxed);
  }
}

void Monitor::Publish() {
  if (published_ || !failure_->failed()) return;
  published_ = true;
  const std::string text = failure_->status().message().substr(0, kFailureTextBytes - 1);
  for (ControlBlock* control : options_.own) {
    control->blamed_rank_plus_1 = static_cast<uint64_t>(failure_->blamed_rank() + 1);
    std::memcpy(control->failure_text, text.c_str(), text.size() + 1);
    // Release: pairs with the acquire in Check; publishes the text.
    control->state.store(MemberState::kFailed, std::memory_order_release);
    control->doorbell.Ring();
  }
}

void Monitor::Check(Watched& watched, std::chrono::steady_clock::time_point now) {
  const MonitorOptions::Peer& peer = watched.peer;
  const std::string who = "group " + options_.group_name + ": rank " + std::to_string(peer.rank) +
                          " (pid " + std::to_string(peer.pid) + ") ";
  int64_t blamed = peer.rank;
  const auto fail = [&](const std::string& what) {
    // Our own close may have begun since the caller looked; peers then leave one after the other.
    if (departures_expected_.load(std::memory_order_acquire)) return;
    failure_->Set(Unavailable(who + what), blamed);
  };
  // Whoever has said good-bye or failed may exit as it likes.
  switch (peer.control->state.load(std::memory_order_acquire)) {
    case MemberState::kRunning:
      break;
    case MemberState::kFailed: {
      const std::string reason(peer.control->failure_text,
                               strnlen(peer.control->failure_text, kFailureTextBytes));
      const uint64_t culprit = peer.control->blamed_rank_plus_1;
      if (culprit != 0) blamed = static_cast<int64_t>(culprit) - 1;
      return fail("failed first: " + reason);
    }
    case MemberState::kClosed:
      return fail("closed the group while this process still used it");
  }
  if (watched.pidfd >= 0) {
    pollfd exited{.fd = watched.pidfd, .events = POLLIN, .revents = 0};
    if (poll(&exited, 1, 0) == 1 && (exited.revents & POLLIN) != 0) {
      return fail("is gone: its process has ended without closing the group");
    }
  }
  const uint64_t beat = peer.control->heartbeat.load(std::memory_order_relaxed);
  if (beat != watched.last_beat) {
    watched.last_beat = beat;
    watched.last_change = now;
  } else if (now - watched.last_change > options_.peer_timeout) {
    fail("stopped answering: no heartbeat for peer_timeout_s = " + Seconds(options_.peer_timeout) +
         " (stopped, swapped out, or its machine is overloaded)");
  }
}

void Monitor::Loop() {
  const auto start = std::chrono::steady_clock::now();
  std::vector<Watched> watched;
  for (const MonitorOptions::Peer& peer : options_.peers) {
    Watched entry{.peer = peer, .last_change = start};
    entry.pidfd = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(peer.pid), 0));
    watched.push_back(entry);
  }
  const auto period =
      std::min<std::chrono::nanoseconds>(options_.peer_timeout / kBeatsPerTimeout, kMaxBeatPeriod);
  const FailureLatch never_failed;
  while (!stopping_.load(std::memory_order_acquire)) {
    for (ControlBlock* control : options_.own) {
      control->heartbeat.fetch_add(1, std::memory_order_relaxed);
    }
    const auto before = std::chrono::steady_clock::now();
    if (!failure_->failed() && !departures_expected_.load(std::memory_order_acquire)) {
      for (Watched& entry : watched) Check(entry, before);
    }
    Publish();
    if (failure_->failed()) {
      for (ControlBlock* control : options_.own) control->doorbell.Ring();
    }
    (void)WaitUntil(
        wake_, [this] { return stopping_.load(std::memory_order_acquire); },
        Deadline::After(period), never_failed);
    // If this thread itself was stopped (SIGSTOP, swap, a suspended VM), the others' clocks are not
    // to blame for what it did not see: give them a fresh start.
    const auto after = std::chrono::steady_clock::now();
    if (after - before > options_.peer_timeout / 2) {
      for (Watched& entry : watched) entry.last_change = after;
    }
  }
  for (const Watched& entry : watched) {
    if (entry.pidfd >= 0) close(entry.pidfd);
  }
}

}  // namespace jax_ep
