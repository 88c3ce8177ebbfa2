#include "proxy/progress.h"

#include <errno.h>
#include <sched.h>

#include <algorithm>
#include <utility>

#include "proxy/base/deadline.h"
#include "proxy/base/log.h"
#include "proxy/base/thread.h"
#include "proxy/proxy.h"

namespace jax_ep {
namespace {

// Stop: how long unsent and unacknowledged messages may hold it up, and then the goodbyes.
constexpr std::chrono::milliseconds kDrainTime{2000};
constexpr std::chrono::milliseconds kByeTime{500};
static_assert(kDrainTime + kByeTime < Proxy::kMaxStopTime, "Stop is bounded");
// After a failure: how long telling the peers may take. One whose queue stays full for longer
// blames whom it has not heard for the longest time.
constexpr std::chrono::milliseconds kFailedTime{500};
static_assert(kDrainTime + kFailedTime < Proxy::kMaxStopTime, "Stop is bounded");
// Pause while what is waited for rings no bell: room in a transport's queue, the end of Stop.
constexpr std::chrono::microseconds kRetryNap{50};
// Rings that nobody rings for are polled without a pause for the first, then with naps of the
// other.
constexpr std::chrono::milliseconds kPollTime{1};
constexpr std::chrono::microseconds kPollNap{50};
// Pause while others help: how late the thread takes over from one that stopped without a word.
// Longer ones gain nothing; with 0.1 ms half a round trip of 16 B over net took 3 % longer.
constexpr std::chrono::milliseconds kHelpedNap{1};
// Rounds with work between two looks at the clock.
constexpr int kBusyRoundsPerClock = 32;
// Most commands that Kick posts on the pushing thread. More are bulk: they go out on the proxy
// thread while the pusher prepares the next.
constexpr uint64_t kInlineCommands = 8;

// Sleeps until the bell has been rung since `bell_count` was read, or the time is over.
void AwaitBell(Doorbell& bell, uint32_t bell_count, std::chrono::nanoseconds limit) {
  timespec timeout{.tv_sec = 0, .tv_nsec = static_cast<long>(limit.count())};
  syscall(SYS_futex, &bell.count, FUTEX_WAIT, bell_count, &timeout, nullptr, 0);
}

// The calling thread. A preference: where it is refused, the thread runs anywhere.
void RunOn(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) {
    if (cpu < CPU_SETSIZE) CPU_SET(static_cast<size_t>(cpu), &set);
  }
  (void)sched_setaffinity(0, sizeof(set), &set);
}

}  // namespace

Progress::Progress(ProgressOptions options, const Endpoints* endpoints, LifeSigns* signs,
                   Doorbell* bell, FailureLatch* failure)
    : options_(std::move(options)),
      endpoints_(*endpoints),
      signs_(*signs),
      bell_(*bell),
      failure_(*failure),
      exception_(Internal("group " + options_.group_name +
                          ": the proxy met an exception (out of memory?)")) {}

Status Progress::Start() {
  is_slow_to_wake_ = std::any_of(endpoints_.begin(), endpoints_.end(),
                                 [](const auto& endpoint) { return !endpoint->has_cheap_wake(); });
  wants_help_ = options_.caller_progress && is_slow_to_wake_;
  must_poll_ = std::any_of(endpoints_.begin(), endpoints_.end(),
                           [](const auto& endpoint) { return endpoint->must_poll(); });
  signs_.Begin();
  is_sending_ = true;
  Result<std::thread> thread =
      StartThread("jax_ep proxy", [this, stop = stop_.get_token()] { Run(stop); });
  if (!thread.ok()) {
    EndSending();
    return thread.status();
  }
  thread_ = std::move(*thread);
  return Status::Ok();
}

void Progress::BeginStop() {
  if (!thread_.joinable()) return;
  stop_.request_stop();
  bell_.Ring();
}

void Progress::Stop() {
  if (!thread_.joinable()) return;
  BeginStop();
  thread_.join();
}

// ---- Rounds, by whoever holds the mutex --------------------------------------------------------

Status Progress::Round(bool* did_work, int64_t* blamed) noexcept try {
  for (const auto& endpoint : endpoints_) {
    Status status = endpoint->Step(did_work);
    if (!status.ok()) {
      *blamed = endpoint->blamed_rank();
      return status;
    }
  }
  return Status::Ok();
} catch (...) {
  return std::move(exception_);
}

void Progress::Latch(Status status, int64_t blamed) {
  const bool is_failure = blamed != FailureLatch::kAgreement;
  if (failure_.Set(std::move(status), blamed)) {
    Log(is_failure ? LogLevel::kError : LogLevel::kInfo, failure_.message());
  }
  for (const auto& endpoint : endpoints_) endpoint->RingDoorbell();
}

// ---- Helpers -----------------------------------------------------------------------------------

void Progress::Kick() {
  bool did_work = false;
  if (!HelpRound(kInlineCommands, &did_work)) bell_.Ring();
}

bool Progress::Help() {
  bool did_work = false;
  // What the round leaves undone is the business of the next, or of EndHelp.
  (void)HelpRound(UINT64_MAX, &did_work);
  return did_work;
}

void Progress::EndHelp(bool leaves_work) {
  num_helpers_.fetch_sub(1, std::memory_order_relaxed);
  if (leaves_work) bell_.Ring();  // after the count: who wakes must not nap for this helper again
}

bool Progress::HelpRound(uint64_t max_commands, bool* did_work) {
  if (!wants_help_ || thread_waits_.load(std::memory_order_relaxed)) return false;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || state_ == ThreadState::kAbsent || failure_.failed()) return false;
  for (const auto& endpoint : endpoints_) {
    if (endpoint->num_queued_commands() > max_commands) return false;
  }
  int64_t blamed = FailureLatch::kNobody;
  if (Status status = Round(did_work, &blamed); !status.ok()) {
    Latch(std::move(status), blamed);
    bell_.Ring();  // the thread tells the peers
    return false;
  }
  const auto needs_the_thread = [](const auto& endpoint) {
    return endpoint->has_unfinished_receives() || endpoint->must_retry();
  };
  if (state_ == ThreadState::kSleeps &&
      std::any_of(endpoints_.begin(), endpoints_.end(), needs_the_thread)) {
    bell_.Ring();
  }
  return std::none_of(endpoints_.begin(), endpoints_.end(),
                      [](const auto& endpoint) { return endpoint->has_unfinished_sends(); });
}

// ---- The thread --------------------------------------------------------------------------------

void Progress::Run(const std::stop_token& stop) noexcept {
  RunOn(options_.cpus);
  std::unique_lock lock(mutex_);
  state_ = ThreadState::kAwake;
  try {
    RunRounds(stop, lock);
  } catch (...) {
    Latch(std::move(exception_), FailureLatch::kNobody);
  }
  EndSending();
  state_ = ThreadState::kAbsent;
}

void Progress::RunRounds(const std::stop_token& stop, std::unique_lock<std::mutex>& lock) {
  Clock::time_point now = Clock::now();
  for (const auto& endpoint : endpoints_) endpoint->Start(now);
  int busy_rounds = 0;
  Clock::time_point stop_at;
  while (true) {
    const uint32_t bell_count = bell_.count.load(std::memory_order_seq_cst);
    if (failure_.failed()) return TellFailure();
    bool did_work = false;
    int64_t blamed = FailureLatch::kNobody;
    Status status = Round(&did_work, &blamed);
    if (!did_work || ++busy_rounds % kBusyRoundsPerClock == 0 || is_stopping_) {
      now = Clock::now();
      if (status.ok()) status = Tick(now, &blamed);
    }
    if (!status.ok()) {
      Latch(std::move(status), blamed);
      return TellFailure();
    }
    if (stop.stop_requested()) {
      if (!is_stopping_) stop_at = now + kDrainTime;
      is_stopping_ = true;
      if ((!did_work && IsDrained()) || now >= stop_at) EndSending();
      // Until the others have ended, too, they may need acknowledgements.
      if (!is_sending_ && (signs_.has_ended() || now >= stop_at)) {
        return SayToAll(ImmControl::kBye, kByeTime);
      }
    }
    idle_rounds_ = did_work ? 0 : idle_rounds_ + 1;
    if (idle_rounds_ == 1) idle_since_ = now;
    if (!did_work) Idle(bell_count, lock);
  }
}

Status Progress::Tick(Clock::time_point now, int64_t* blamed) noexcept try {
  for (const auto& endpoint : endpoints_) {
    if (now < endpoint->next_tick()) continue;
    Status status = endpoint->Tick(now);
    if (!status.ok()) {
      *blamed = endpoint->blamed_rank();
      return status;
    }
  }
  return Status::Ok();
} catch (...) {
  return std::move(exception_);
}

void Progress::EndSending() {
  if (std::exchange(is_sending_, false)) signs_.End();
}

bool Progress::IsDrained() const {
  return std::all_of(endpoints_.begin(), endpoints_.end(),
                     [](const auto& endpoint) { return endpoint->is_drained(); });
}

// Spin -> pause -> yield -> futex; a short nap where others help. `bell_count` was read before the
// round that found nothing (see Doorbell::Ring for the other side).
void Progress::Idle(uint32_t bell_count, std::unique_lock<std::mutex>& lock) {
  if (num_helpers_.load(std::memory_order_relaxed) > 0) {
    // Afterwards it goes to sleep: what does not come within a nap will not come within yields.
    idle_rounds_ = kNetworkYieldRounds;
    return Pause(ThreadState::kNaps, bell_count, kHelpedNap, lock);
  }
  if (!is_slow_to_wake_ && idle_rounds_ < kSpinRounds) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    return;
  }
  if (idle_rounds_ < (is_slow_to_wake_ ? kNetworkYieldRounds : kSpinRounds + kYieldRounds)) {
    std::this_thread::yield();
    return;
  }
  if (must_poll_ && Clock::now() - idle_since_ < kPollTime) return std::this_thread::yield();
  bool may_sleep = true;
  for (const auto& endpoint : endpoints_) may_sleep = endpoint->PrepareToSleep() && may_sleep;
  if (!may_sleep) return std::this_thread::yield();
  Pause(ThreadState::kSleeps, bell_count, must_poll_ ? kPollNap : kMaxSleep, lock);
}

void Progress::Pause(ThreadState state, uint32_t bell_count, std::chrono::nanoseconds limit,
                     std::unique_lock<std::mutex>& lock) {
  const Clock::time_point now = Clock::now();
  if (is_stopping_) limit = std::min<std::chrono::nanoseconds>(limit, kRetryNap);
  for (const auto& endpoint : endpoints_) {
    if (endpoint->must_retry()) limit = std::min<std::chrono::nanoseconds>(limit, kRetryNap);
    limit = std::min<std::chrono::nanoseconds>(limit, endpoint->next_tick() - now);
  }
  if (limit.count() <= 0) return;
  state_ = state;
  bell_.waiters.fetch_add(1, std::memory_order_seq_cst);
  lock.unlock();
  AwaitBell(bell_, bell_count, limit);
  thread_waits_.store(true, std::memory_order_relaxed);
  lock.lock();
  thread_waits_.store(false, std::memory_order_relaxed);
  bell_.waiters.fetch_sub(1, std::memory_order_seq_cst);
  state_ = ThreadState::kAwake;
}

void Progress::TellFailure() {
  for (const auto& endpoint : endpoints_) endpoint->RingDoorbell();
  SayToAll(ImmControl::kFailed, kFailedTime);
}

void Progress::SayToAll(ImmControl control, std::chrono::nanoseconds limit) {
  const int64_t blamed = failure_.blamed_rank();
  const Deadline deadline = Deadline::After(limit);
  while (true) {
    bool is_done = true;
    for (const auto& endpoint : endpoints_) {
      const bool is_failure = control == ImmControl::kFailed;
      const uint32_t payload = is_failure ? endpoint->FailurePayload(blamed) : 0;
      is_done = endpoint->SendToAll(control, payload) && is_done;
      is_done = endpoint->DrainCompletions() && is_done;
    }
    if (is_done || deadline.expired()) return;
    std::this_thread::yield();
  }
}

}  // namespace jax_ep
