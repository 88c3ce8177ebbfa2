// The proxy thread: its loop, its sleep, its end.
#include "proxy/proxy.h"

#include <errno.h>

#include <algorithm>
#include <bit>
#include <mutex>
#include <new>
#include <stop_token>
#include <thread>
#include <utility>

#include "proxy/base/log.h"
#include "proxy/base/shared_memory.h"
#include "proxy/base/thread.h"
#include "proxy/endpoint.h"
#include "proxy/transport/registry.h"

namespace jax_ep {
namespace {

using Clock = std::chrono::steady_clock;

// Stop: how long unsent and unacknowledged messages may hold it up, and then the goodbyes.
constexpr std::chrono::milliseconds kDrainTime{2000};
constexpr std::chrono::milliseconds kByeTime{500};
static_assert(kDrainTime + kByeTime < Proxy::kMaxStopTime, "Stop is bounded");
// After a failure: how long telling the peers may take. One whose queue stays full for longer
// blames whom it has not heard for the longest time.
constexpr std::chrono::milliseconds kFailedTime{500};
static_assert(kDrainTime + kFailedTime < Proxy::kMaxStopTime, "Stop is bounded");
// Nap while a transport's full queue is waited for: it rings no bell.
constexpr std::chrono::microseconds kRetryNap{50};
// Rings that nobody rings for are polled without a pause for the first, then with naps of the
// other.
constexpr std::chrono::milliseconds kPollTime{1};
constexpr std::chrono::microseconds kPollNap{50};
// Rounds with work between two looks at the clock.
constexpr int kBusyRoundsPerClock = 32;
// Most commands that Kick posts on the pushing thread. More are bulk: they go out on the proxy
// thread while the pusher prepares the next.
constexpr uint64_t kInlineCommands = 8;
// Naps of the proxy thread while others help, each twice the one before: how late it takes over
// from one that stopped without a word. Short naps are dear: in a virtual machine a timer every 0.1
// ms took a third of what helping gains.
constexpr std::chrono::microseconds kFirstHelpedNap{100};
constexpr std::chrono::microseconds kLastHelpedNap{1600};

// Sleeps until the bell has been rung since `bell_count` was read, or the time is over (false).
bool AwaitBell(Doorbell& bell, uint32_t bell_count, std::chrono::nanoseconds limit) {
  timespec timeout{.tv_sec = 0, .tv_nsec = static_cast<long>(limit.count())};
  return syscall(SYS_futex, &bell.count, FUTEX_WAIT, bell_count, &timeout, nullptr, 0) == 0 ||
         errno != ETIMEDOUT;
}

}  // namespace

struct Proxy::Impl {
  ProxyOptions options;
  FailureLatch* failure = nullptr;
  SharedMemory bell_memory;
  Doorbell* bell = nullptr;
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  bool is_started = false;
  bool wants_help = false;       // fixed by Start
  bool must_poll = false;        // fixed by Start
  Clock::time_point idle_since;  // of the thread
  std::stop_source stop;
  std::thread thread;

  // Held during every round, by whoever does it. The thread lets go of it only to sleep.
  std::mutex mutex;
  bool accepts_help = false;  // under the mutex, like the next three: the thread runs
  bool sleeps_long = false;   // the thread does not look after what helpers leave behind
  Status help_status = {};    // the first that failed; the thread reports it
  int64_t help_blamed = FailureLatch::kNobody;
  std::atomic<uint64_t> num_helped{0};    // rounds that other threads did
  std::atomic<int> num_helpers{0};        // threads between BeginHelp and EndHelp
  std::atomic<bool> thread_waits{false};  // for the mutex: helpers keep off

  void Run(const std::stop_token& stop);
  void RunRounds(const std::stop_token& stop, std::unique_lock<std::mutex>& lock);
  // A round on the calling thread. True if it was done and nothing is left to be sent.
  bool HelpRound(uint64_t max_commands, bool* did_work);
  // One round of every endpoint; the first error, with whom it blames. We throw nothing; the
  // standard library may (memory), and that must not end the process.
  Status Round(bool* did_work, int64_t* blamed) noexcept;
  Status Tick(Clock::time_point now, int64_t* blamed);
  void Idle(int idle_rounds, uint32_t bell_count, uint64_t* seen_helped,
            std::unique_lock<std::mutex>& lock);
  // The latest moment to which the thread may sleep.
  Clock::time_point next_duty(Clock::time_point now) const;
  // Calls sleep() without the mutex.
  template <typename Sleep>
  void SleepUnlocked(std::unique_lock<std::mutex>& lock, Sleep&& sleep);
  void Fail(const Status& status, int64_t blamed);  // or the latch's, where others were first
  void SayToAll(ImmControl control, uint32_t payload, std::chrono::nanoseconds limit);
  bool IsDrained() const {
    return std::all_of(endpoints.begin(), endpoints.end(),
                       [](const auto& endpoint) { return endpoint->is_drained(); });
  }
};

Status Proxy::Impl::Round(bool* did_work, int64_t* blamed) noexcept try {
  for (const auto& endpoint : endpoints) {
    Status status = endpoint->Step(did_work);
    if (!status.ok()) {
      *blamed = endpoint->blamed_rank();
      return status;
    }
  }
  return Status::Ok();
} catch (...) {
  return Internal("proxy: a round ended with an exception (out of memory?)");
}

Status Proxy::Impl::Tick(Clock::time_point now, int64_t* blamed) {
  for (const auto& endpoint : endpoints) {
    if (now < endpoint->next_tick()) continue;
    Status status = endpoint->Tick(now);
    if (!status.ok()) {
      *blamed = endpoint->blamed_rank();
      return status;
    }
  }
  return Status::Ok();
}

// Spin -> pause -> yield -> futex; a short nap where others help. `bell_count` was read before the
// round that found nothing, so a ring since then ends the sleep at once (see Doorbell::Ring for the
// other side).
void Proxy::Impl::Idle(int idle_rounds, uint32_t bell_count, uint64_t* seen_helped,
                       std::unique_lock<std::mutex>& lock) {
  const auto count_helped = [this] { return num_helped.load(std::memory_order_relaxed); };
  if (num_helpers.load(std::memory_order_relaxed) > 0 || count_helped() != *seen_helped) {
    const Clock::time_point end = next_duty(Clock::now());
    SleepUnlocked(lock, [&] {
      for (auto nap = kFirstHelpedNap; Clock::now() < end;
           nap = std::min(2 * nap, kLastHelpedNap)) {
        *seen_helped = count_helped();
        if (AwaitBell(*bell, bell_count, nap) || count_helped() == *seen_helped) break;
      }
    });
    *seen_helped = count_helped();
    return;
  }
  if (!wants_help && idle_rounds < kSpinRounds) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    return;
  }
  if (idle_rounds < (wants_help ? kNetworkYieldRounds : kSpinRounds + kYieldRounds)) {
    std::this_thread::yield();
    return;
  }
  if (must_poll && Clock::now() - idle_since < kPollTime) return std::this_thread::yield();
  bool may_sleep = true;
  for (const auto& endpoint : endpoints) may_sleep = endpoint->PrepareToSleep() && may_sleep;
  if (!may_sleep) return std::this_thread::yield();
  const Clock::time_point now = Clock::now();
  const Clock::time_point end = next_duty(now);
  if (end <= now) return;
  sleeps_long = true;
  SleepUnlocked(lock, [&] { (void)AwaitBell(*bell, bell_count, end - now); });
  sleeps_long = false;
}

Clock::time_point Proxy::Impl::next_duty(Clock::time_point now) const {
  Clock::time_point end = now + (must_poll ? kPollNap : kMaxSleep);
  for (const auto& endpoint : endpoints) {
    if (endpoint->must_retry()) end = std::min<Clock::time_point>(end, now + kRetryNap);
    end = std::min<Clock::time_point>(end, endpoint->next_tick());
  }
  return end;
}

template <typename Sleep>
void Proxy::Impl::SleepUnlocked(std::unique_lock<std::mutex>& lock, Sleep&& sleep) {
  bell->waiters.fetch_add(1, std::memory_order_seq_cst);
  lock.unlock();
  sleep();
  thread_waits.store(true, std::memory_order_relaxed);
  lock.lock();
  thread_waits.store(false, std::memory_order_relaxed);
  bell->waiters.fetch_sub(1, std::memory_order_seq_cst);
}

bool Proxy::Impl::HelpRound(uint64_t max_commands, bool* did_work) {
  if (!wants_help || thread_waits.load(std::memory_order_relaxed)) return false;
  const std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock.owns_lock() || !accepts_help) return false;
  for (const auto& endpoint : endpoints) {
    if (endpoint->num_queued_commands() > max_commands) return false;
  }
  num_helped.fetch_add(1, std::memory_order_relaxed);
  help_status = Round(did_work, &help_blamed);
  accepts_help = help_status.ok();
  if (!accepts_help ||
      (sleeps_long && std::any_of(endpoints.begin(), endpoints.end(), [](const auto& endpoint) {
         return endpoint->has_unfinished_receives();
       }))) {
    bell->Ring();
  }
  return accepts_help && std::none_of(endpoints.begin(), endpoints.end(), [](const auto& endpoint) {
           return endpoint->has_unfinished_sends();
         });
}

void Proxy::Impl::SayToAll(ImmControl control, uint32_t payload, std::chrono::nanoseconds limit) {
  const Deadline deadline = Deadline::After(limit);
  while (true) {
    bool is_done = true;
    for (const auto& endpoint : endpoints) {
      is_done = endpoint->SendToAll(control, payload) && is_done;
      is_done = endpoint->DrainCompletions() && is_done;
    }
    if (is_done || deadline.expired()) return;
    std::this_thread::yield();
  }
}

void Proxy::Impl::Fail(const Status& status, int64_t blamed) {
  if (failure->Set(status, blamed)) LogError(status.message());  // else its latcher has reported it
  blamed = failure->blamed_rank();
  for (const auto& endpoint : endpoints) endpoint->RingDoorbell();
  SayToAll(ImmControl::kFailed, blamed < 0 ? 0 : static_cast<uint32_t>(blamed) + 1, kFailedTime);
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

void Proxy::Impl::Run(const std::stop_token& stop) {
  RunOn(options.cpus);
  std::unique_lock lock(mutex);
  accepts_help = wants_help;
  try {
    RunRounds(stop, lock);
  } catch (...) {
    failure->Set(Internal("group " + options.group_name +
                          ": the proxy's thread ended with an exception (out of memory?)"));
    for (const auto& endpoint : endpoints) endpoint->RingDoorbell();
  }
  accepts_help = false;
}

void Proxy::Impl::RunRounds(const std::stop_token& stop, std::unique_lock<std::mutex>& lock) {
  Clock::time_point now = Clock::now();
  for (const auto& endpoint : endpoints) endpoint->Start(now);
  int idle_rounds = 0;
  int busy_rounds = 0;
  uint64_t seen_helped = 0;
  bool is_stopping = false;
  Clock::time_point stop_at;
  while (true) {
    const uint32_t bell_count = bell->count.load(std::memory_order_seq_cst);
    int64_t blamed = FailureLatch::kNobody;
    if (failure->failed()) return Fail(failure->status(), blamed);
    if (!help_status.ok()) return Fail(help_status, help_blamed);
    bool did_work = false;
    Status status = Round(&did_work, &blamed);
    if (!did_work || ++busy_rounds % kBusyRoundsPerClock == 0 || is_stopping) {
      now = Clock::now();
      if (status.ok()) status = Tick(now, &blamed);
    }
    if (!status.ok()) return Fail(status, blamed);
    if (stop.stop_requested()) {
      if (!is_stopping) stop_at = now + kDrainTime;
      is_stopping = true;
      if ((!did_work && IsDrained()) || now >= stop_at) {
        return SayToAll(ImmControl::kBye, 0, kByeTime);
      }
    }
    idle_rounds = did_work ? 0 : idle_rounds + 1;
    if (idle_rounds == 1) idle_since = now;
    if (!did_work) Idle(idle_rounds, bell_count, &seen_helped, lock);
  }
}

Result<std::unique_ptr<Proxy>> Proxy::Create(ProxyOptions options, FailureLatch* failure) {
  const auto bad = [&options](const std::string& what) {
    return InvalidArgument("group " + options.group_name + ": proxy: " + what);
  };
  if (failure == nullptr) return bad("no failure latch");
  if (options.window_messages == 0 || options.window_messages > kMaxWindowMessages) {
    return bad("window_messages=" + std::to_string(options.window_messages) + "; expected 1 to " +
               std::to_string(kMaxWindowMessages) +
               ", half of the sequence space (JAX_EP_WINDOW_MESSAGES)");
  }
  if (options.window_bytes < kCommandUnitBytes) {
    return bad("window_bytes=" + std::to_string(options.window_bytes) +
               "; expected at least 16 (JAX_EP_WINDOW_BYTES)");
  }
  if (!std::has_single_bit(options.inbox_slots)) {
    return bad("inbox_slots=" + std::to_string(options.inbox_slots) +
               "; expected a power of two (JAX_EP_INBOX_SLOTS)");
  }
  if (options.peer_timeout.count() <= 0 || options.timeout.count() <= 0) {
    return bad("timeouts must be positive");
  }
  auto impl = std::make_unique<Impl>();
  // In shared memory because transports of other processes ring it.
  JAX_EP_ASSIGN_OR_RETURN(impl->bell_memory,
                          SharedMemory::Create(sizeof(Doorbell), /*shareable=*/true));
  impl->bell = new (impl->bell_memory.bytes().data()) Doorbell{};
  impl->options = std::move(options);
  impl->failure = failure;
  return std::unique_ptr<Proxy>(new Proxy(std::move(impl)));
}

Proxy::Proxy(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Proxy::~Proxy() { Stop(); }

Result<int> Proxy::AddEndpoint(EndpointOptions options) {
  if (impl_->is_started) return FailedPrecondition("proxy: AddEndpoint after Start");
  const TransportOptions transport_options{.rank = options.rank,
                                           .inbox_slots = impl_->options.inbox_slots,
                                           .bell = impl_->bell,
                                           .bell_export = impl_->bell_memory.Export(),
                                           .faulty_spec = impl_->options.faulty_spec,
                                           .place = options.place};
  JAX_EP_ASSIGN_OR_RETURN(std::unique_ptr<Transport> transport,
                          impl_->options.transport_factory
                              ? impl_->options.transport_factory(transport_options)
                              : MakeTransport(impl_->options.transport, transport_options));
  JAX_EP_ASSIGN_OR_RETURN(std::unique_ptr<Endpoint> endpoint,
                          Endpoint::Create(impl_->options, options, std::move(transport)));
  impl_->endpoints.push_back(std::move(endpoint));
  return static_cast<int>(impl_->endpoints.size()) - 1;
}

std::string Proxy::LocalBlob(int endpoint) const {
  return impl_->endpoints[static_cast<size_t>(endpoint)]->LocalBlob();
}

Status Proxy::Connect(int endpoint, uint32_t peer, std::string_view blob, Deadline deadline) {
  if (impl_->is_started) return FailedPrecondition("proxy: Connect after Start");
  if (endpoint < 0 || static_cast<size_t>(endpoint) >= impl_->endpoints.size()) {
    return InvalidArgument("proxy: Connect of endpoint " + std::to_string(endpoint) + " of " +
                           std::to_string(impl_->endpoints.size()));
  }
  return impl_->endpoints[static_cast<size_t>(endpoint)]->Connect(peer, blob, deadline);
}

Status Proxy::Start() {
  if (impl_->is_started) return FailedPrecondition("proxy: Start was already called");
  for (const auto& endpoint : impl_->endpoints) {
    if (const std::optional<uint32_t> peer = endpoint->FirstUnconnectedPeer()) {
      return FailedPrecondition("proxy: Start before rank " + std::to_string(endpoint->rank()) +
                                " is connected to rank " + std::to_string(*peer));
    }
  }
  impl_->wants_help = std::any_of(impl_->endpoints.begin(), impl_->endpoints.end(),
                                  [](const auto& endpoint) { return !endpoint->has_cheap_wake(); });
  impl_->must_poll = std::any_of(impl_->endpoints.begin(), impl_->endpoints.end(),
                                 [](const auto& endpoint) { return endpoint->must_poll(); });
  JAX_EP_ASSIGN_OR_RETURN(
      impl_->thread,
      StartThread("jax_ep proxy",
                  [impl = impl_.get(), stop = impl_->stop.get_token()] { impl->Run(stop); }));
  impl_->is_started = true;
  return Status::Ok();
}

void Proxy::Stop() {
  if (!impl_->thread.joinable()) return;
  impl_->stop.request_stop();
  impl_->bell->Ring();
  impl_->thread.join();
}

RingView Proxy::ring(int endpoint) {
  return impl_->endpoints[static_cast<size_t>(endpoint)]->ring();
}

void Proxy::Kick() {
  bool did_work = false;
  if (!impl_->HelpRound(kInlineCommands, &did_work)) impl_->bell->Ring();
}

bool Proxy::wants_help() const { return impl_->wants_help; }

void Proxy::BeginHelp() { impl_->num_helpers.fetch_add(1, std::memory_order_relaxed); }

void Proxy::EndHelp(bool leaves_work) {
  impl_->num_helpers.fetch_sub(1, std::memory_order_relaxed);
  if (leaves_work) impl_->bell->Ring();
}

bool Proxy::Help() {
  bool did_work = false;
  // What the round leaves undone is the business of the next, or of EndHelp.
  (void)impl_->HelpRound(UINT64_MAX, &did_work);
  return did_work;
}

std::atomic<uint64_t>* Proxy::quiet_flag(int endpoint) {
  return impl_->endpoints[static_cast<size_t>(endpoint)]->quiet_flag();
}

std::string Proxy::DumpState() const {
  std::string text;
  for (const auto& endpoint : impl_->endpoints) endpoint->AppendState(&text);
  return text;
}

std::vector<FlowStats> Proxy::Stats() const {
  std::vector<FlowStats> stats;
  for (const auto& endpoint : impl_->endpoints) endpoint->AppendStats(&stats);
  return stats;
}

}  // namespace jax_ep
