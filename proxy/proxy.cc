// The proxy thread: its loop, its sleep, its end.
#include "proxy/proxy.h"

#include <algorithm>
#include <bit>
#include <new>
#include <thread>
#include <utility>

#include "proxy/base/log.h"
#include "proxy/base/shared_memory.h"
#include "proxy/endpoint.h"
#include "proxy/transport/registry.h"

namespace jax_ep {
namespace {

using Clock = std::chrono::steady_clock;

// Stop: how long unsent and unacknowledged messages may hold it up, and then the goodbyes.
constexpr std::chrono::milliseconds kDrainTime{2000};
constexpr std::chrono::milliseconds kByeTime{500};
static_assert(kDrainTime + kByeTime < Proxy::kMaxStopTime, "Stop is bounded");
// After a failure: how long telling the peers may take.
constexpr std::chrono::milliseconds kFailedTime{200};
// Nap while a transport's full queue is waited for: it rings no bell.
constexpr std::chrono::microseconds kRetryNap{50};
// Rounds with work between two looks at the clock.
constexpr int kBusyRoundsPerClock = 32;

}  // namespace

struct Proxy::Impl {
  ProxyOptions options;
  FailureLatch* failure = nullptr;
  SharedMemory bell_memory;
  Doorbell* bell = nullptr;
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  bool is_started = false;
  std::jthread thread;

  void Run(std::stop_token stop);
  // One round of every endpoint; the first error, with whom it blames.
  Status Round(bool* did_work, int64_t* blamed);
  Status Tick(Clock::time_point now, int64_t* blamed);
  void Idle(int idle_rounds, uint32_t bell_count);
  void Fail(const Status& status, int64_t blamed);
  void SayToAll(ImmControl control, uint32_t payload, std::chrono::nanoseconds limit);
  bool IsDrained() const {
    return std::all_of(endpoints.begin(), endpoints.end(),
                       [](const auto& endpoint) { return endpoint->is_drained(); });
  }
};

Status Proxy::Impl::Round(bool* did_work, int64_t* blamed) {
  for (const auto& endpoint : endpoints) {
    Status status = endpoint->Step(did_work);
    if (!status.ok()) {
      *blamed = endpoint->blamed_rank();
      return status;
    }
  }
  return Status::Ok();
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

// Spin -> pause -> yield -> futex. `bell_count` was read before the round that found nothing, so a
// ring since then ends the sleep at once (see Doorbell::Ring for the other side).
void Proxy::Impl::Idle(int idle_rounds, uint32_t bell_count) {
  const bool has_cheap_wake =
      std::all_of(endpoints.begin(), endpoints.end(),
                  [](const auto& endpoint) { return endpoint->has_cheap_wake(); });
  if (has_cheap_wake && idle_rounds < kSpinRounds) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    return;
  }
  if (idle_rounds < (has_cheap_wake ? kSpinRounds + kYieldRounds : kNetworkYieldRounds)) {
    std::this_thread::yield();
    return;
  }
  std::chrono::nanoseconds nap = kMaxSleep;
  const Clock::time_point now = Clock::now();
  for (const auto& endpoint : endpoints) {
    if (endpoint->must_retry()) nap = std::min<std::chrono::nanoseconds>(nap, kRetryNap);
    nap = std::min<std::chrono::nanoseconds>(nap, endpoint->next_tick() - now);
  }
  if (nap.count() <= 0) return;
  bell->waiters.fetch_add(1, std::memory_order_seq_cst);
  timespec timeout{.tv_sec = 0, .tv_nsec = static_cast<long>(nap.count())};
  syscall(SYS_futex, &bell->count, FUTEX_WAIT, bell_count, &timeout, nullptr, 0);
  bell->waiters.fetch_sub(1, std::memory_order_seq_cst);
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
  if (failure->Set(status)) LogError(status.message());  // else its latcher has reported it
  for (const auto& endpoint : endpoints) endpoint->RingDoorbell();
  SayToAll(ImmControl::kFailed, blamed < 0 ? 0 : static_cast<uint32_t>(blamed) + 1, kFailedTime);
}

void Proxy::Impl::Run(std::stop_token stop) {
  Clock::time_point now = Clock::now();
  for (const auto& endpoint : endpoints) endpoint->Start(now);
  int idle_rounds = 0;
  int busy_rounds = 0;
  bool is_stopping = false;
  Clock::time_point stop_at;
  while (true) {
    const uint32_t bell_count = bell->count.load(std::memory_order_seq_cst);
    int64_t blamed = Endpoint::kNobody;
    if (failure->failed()) {
      if (options.blamed_rank) blamed = options.blamed_rank();
      return Fail(failure->status(), blamed);
    }
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
    if (!did_work) Idle(idle_rounds, bell_count);
  }
}

Result<std::unique_ptr<Proxy>> Proxy::Create(ProxyOptions options, FailureLatch* failure) {
  const auto bad = [&options](const std::string& what) {
    return InvalidArgument("proxy of group \"" + options.group_name + "\": " + what);
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
  impl_->is_started = true;
  impl_->thread = std::jthread([impl = impl_.get()](std::stop_token stop) {
    // We throw nothing; the standard library may (memory). It must not end the process.
    try {
      impl->Run(std::move(stop));
    } catch (...) {
      impl->failure->Set(Internal("proxy of group \"" + impl->options.group_name +
                                  "\": the thread ended with an exception (out of memory?)"));
      for (const auto& endpoint : impl->endpoints) endpoint->RingDoorbell();
    }
  });
  return Status::Ok();
}

void Proxy::Stop() {
  if (!impl_->thread.joinable()) return;
  impl_->thread.request_stop();
  impl_->bell->Ring();
  impl_->thread.join();
}

RingView Proxy::ring(int endpoint) {
  return impl_->endpoints[static_cast<size_t>(endpoint)]->ring();
}

Doorbell* Proxy::bell() { return impl_->bell; }

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
