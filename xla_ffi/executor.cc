#include "xla_ffi/executor.h"

#include <algorithm>
#include <utility>

#include "proxy/base/log.h"
#include "proxy/base/thread.h"

namespace jax_ep {
namespace {

// How often an executor with nothing to do looks at its queue's age; wake-ups come by doorbell.
constexpr std::chrono::seconds kOverdueCheckPeriod{1};

// The executor whose continuation this thread is running, if any.
thread_local const Executor* continuing_executor = nullptr;

}  // namespace

Executor::Executor(std::unique_ptr<Rank> rank, std::unique_ptr<AgreedOrder> order,
                   ContinuationWatch* watch)
    : rank_(std::move(rank)),
      order_(std::move(order)),
      exception_(Internal("group " + rank_->group_name + ": the executor of " +
                          rank_->NameOf(rank_->rank) + " met an exception (out of memory?)")),
      watch_(watch) {}

Result<std::unique_ptr<Executor>> Executor::Create(std::unique_ptr<Rank> rank,
                                                   std::unique_ptr<AgreedOrder> order,
                                                   ContinuationWatch* watch) {
  std::unique_ptr<Executor> executor(new Executor(std::move(rank), std::move(order), watch));
  executor->offer_ = true;  // for whichever thread comes first
  for (int i = 0; i < 2; ++i) {
    JAX_EP_ASSIGN_OR_RETURN(
        std::thread thread,
        StartThread("jax_ep executor", [e = executor.get()] { e->ThreadLoop(); }));
    executor->threads_.push_back(std::move(thread));
  }
  watch->Add(executor.get());
  return executor;
}

Executor::~Executor() { Stop(FailedPrecondition("group " + rank_->group_name + " is closed")); }

ControlBlock& Executor::control() const {
  return *reinterpret_cast<ControlBlock*>(rank_->heaps[rank_->rank]);
}

void Executor::Enqueue(Call call) {
  call.enqueued = std::chrono::steady_clock::now();
  const uint64_t enqueued_ns = NanosecondsOf(call.enqueued);
  {
    std::unique_lock lock(queue_mutex_);
    if (refuses_) {
      const Status reason = reason_;
      lock.unlock();
      call.complete(reason);
      return;
    }
    queue_.push_back(std::move(call));
    const uint64_t number = num_enqueued_.fetch_add(1, std::memory_order_release) + 1;
    activity().num_enqueued.store(number, std::memory_order_relaxed);
    activity().enqueued_ns.store(enqueued_ns, std::memory_order_relaxed);
    num_queued_.fetch_add(1, std::memory_order_seq_cst);
  }
  // seq_cst with TrySit and the leaving of the seat: either this thread sees the seat free, or who
  // leaves it sees the call.
  if (seat_taken_.load(std::memory_order_seq_cst)) {
    doorbell().Ring();
  } else if (continuing_executor == this) {
    watch_->Wake();  // this very thread will sit down again, unless its continuation blocks
  } else {
    OfferSeat();
  }
}

size_t Executor::num_queued() const {
  std::lock_guard lock(queue_mutex_);
  return queue_.size();
}

uint64_t Executor::oldest_queued_ns() const {
  std::lock_guard lock(queue_mutex_);
  if (queue_.empty()) return 0;
  return NanosecondsOf(queue_.front().enqueued);
}

uint64_t Executor::num_needed() const {
  std::lock_guard lock(queue_mutex_);
  const uint64_t taken = num_taken_.load(std::memory_order_relaxed);
  if (taken != num_executed_.load(std::memory_order_acquire)) return taken;
  return queue_.empty() ? 0 : taken + 1;
}

void Executor::Refuse(const Status& reason) {
  std::lock_guard lock(queue_mutex_);
  if (refuses_) return;
  refuses_ = true;
  reason_ = reason;
}

void Executor::Stop(const Status& reason) {
  Refuse(reason);
  stopping_.store(true, std::memory_order_release);
  doorbell().Ring();
  {
    std::lock_guard lock(seat_mutex_);
    seat_offered_.notify_all();
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  threads_.clear();
  watch_->Remove(this);
}

// ---- The seat --------------------------------------------------------------------------------

bool Executor::TrySit() {
  bool free = false;
  return seat_taken_.compare_exchange_strong(free, true, std::memory_order_seq_cst);
}

void Executor::OfferSeat() {
  {
    std::lock_guard lock(seat_mutex_);
    offer_ = true;
  }
  seat_offered_.notify_one();
}

uint64_t Executor::blocking_continuation() const {
  const uint64_t number = continuation_.load(std::memory_order_acquire);
  const bool waiting = num_queued_.load(std::memory_order_seq_cst) != 0 &&
                       !seat_taken_.load(std::memory_order_seq_cst);
  return waiting ? number : 0;
}

void Executor::ThreadLoop() {
  while (!stopping_.load(std::memory_order_acquire)) {
    if (TrySit()) {
      ExecuteWhileSeated();
      continue;
    }
    std::unique_lock lock(seat_mutex_);
    seat_offered_.wait(lock,
                       [this] { return offer_ || stopping_.load(std::memory_order_acquire); });
    offer_ = false;
  }
  // Whoever leaves last finds the queue empty or fails what came in between.
  Status reason;
  {
    std::lock_guard lock(queue_mutex_);
    reason = reason_;
  }
  FailQueued(reason);
}

bool Executor::CompleteAndSit(Call call, Status status) {
  continuation_.fetch_add(1, std::memory_order_release);
  seat_taken_.store(false, std::memory_order_seq_cst);
  // Calls that came from elsewhere while this thread sat must not wait for the continuation.
  if (num_queued_.load(std::memory_order_seq_cst) != 0) OfferSeat();
  const Executor* outer = std::exchange(continuing_executor, this);
  call.complete(std::move(status));
  continuing_executor = outer;
  call = Call();
  return TrySit();
}

// ---- Calls -----------------------------------------------------------------------------------

std::optional<Call> Executor::TakeNext() noexcept try {
  // Peek even with an empty queue: a node leader passes announcements on to its mates here.
  std::optional<OrderEntry> entry = order_->Peek();
  if (!entry.has_value() && order_->can_announce()) {
    OrderEntry mine;
    {
      std::lock_guard lock(queue_mutex_);
      if (queue_.empty()) return std::nullopt;
      mine = queue_.front().key;
    }
    if (Status status = order_->Announce(mine); !status.ok()) {
      rank_->failure->Set(std::move(status));
      return std::nullopt;
    }
    entry = order_->Peek();
  }
  if (!entry.has_value()) return std::nullopt;
  std::lock_guard lock(queue_mutex_);
  // First of equal keys: a site repeats only in a loop, whose iterations XLA runs in order.
  const auto it = std::find_if(queue_.begin(), queue_.end(), [&](const Call& call) {
    return call.key.run_id == entry->run_id && call.key.site == entry->site;
  });
  if (it == queue_.end()) return std::nullopt;
  std::optional<Call> taken = std::move(*it);
  queue_.erase(it);
  order_->Advance();
  num_taken_.fetch_add(1, std::memory_order_relaxed);
  num_queued_.fetch_sub(1, std::memory_order_relaxed);
  return taken;
} catch (...) {
  FailByException();
  return std::nullopt;
}

void Executor::CheckOverdue() noexcept try {
  std::string message;
  {
    std::lock_guard lock(queue_mutex_);
    if (queue_.empty()) return;
    const Call& oldest = queue_.front();
    if (std::chrono::steady_clock::now() - oldest.enqueued < rank_->timeout) return;
    const std::optional<OrderEntry> next = order_->Peek();
    message = "group " + rank_->group_name + ": " + oldest.operation + " on " +
              rank_->NameOf(rank_->rank) + " waited longer than timeout_s for its turn: ";
    message += next.has_value()
                   ? "the call that the team executes next (position " +
                         std::to_string(order_->position()) + ", site " +
                         std::to_string(next->site) + ") has not reached this rank; it has " +
                         std::to_string(queue_.size()) + " other call(s) waiting"
                   : "nothing was announced beyond position (" +
                         std::to_string(order_->position()) +
                         " executed); is every process running the same program?";
  }
  rank_->failure->Set(DeadlineExceeded(std::move(message)));
} catch (...) {
  FailByException();
}

void Executor::FailQueued(const Status& reason) {
  std::unique_lock lock(queue_mutex_);
  while (!queue_.empty()) {
    const Call call = std::move(queue_.front());
    queue_.pop_front();
    num_queued_.fetch_sub(1, std::memory_order_relaxed);
    lock.unlock();
    call.complete(reason);
    lock.lock();
  }
}

std::optional<Call> Executor::WaitForCall() {
  std::optional<Call> next;
  // Acquire pairs with the release in Stop (stopping_) and Enqueue (num_queued_).
  const auto ready = [&] {
    if (stopping_.load(std::memory_order_acquire)) return true;
    const bool may_have_work = num_queued_.load(std::memory_order_acquire) != 0 ||
                               (!order_->can_announce() && order_->leads_node());
    if (may_have_work) next = TakeNext();
    return next.has_value();
  };
  const Deadline period = Deadline::After(kOverdueCheckPeriod);
  const WaitResult result = WaitUntil(doorbell(), ready, period, *rank_->failure,
                                      order_->comes_by_proxy() ? rank_->proxy : nullptr);
  if (next.has_value() || result == WaitResult::kReady) return next;
  if (result == WaitResult::kTimeout) {
    CheckOverdue();
    return next;
  }
  // The latch is never cleared: from here on every call fails, in arrival order, each through
  // CompleteAndSit (a continuation must never run while its thread holds the seat).
  const FailureLatch never_failed;
  (void)WaitUntil(
      doorbell(),
      [&] {
        return stopping_.load(std::memory_order_acquire) ||
               num_queued_.load(std::memory_order_acquire) != 0;
      },
      period, never_failed);
  std::lock_guard lock(queue_mutex_);
  if (!queue_.empty()) {
    next = std::move(queue_.front());
    queue_.pop_front();
    num_taken_.fetch_add(1, std::memory_order_relaxed);
    num_queued_.fetch_sub(1, std::memory_order_relaxed);
  }
  return next;
}

Status Executor::RunCall(Call& call) noexcept try {
  activity().BeginCall(num_taken_.load(std::memory_order_relaxed), call.operation, call.site);
  const uint64_t begin_ns = activity().since_ns.load(std::memory_order_relaxed);
  Status status = call.run(*rank_);
  const uint64_t end_ns = MonotonicNs();
  if (TraceTrack* const trace = rank_->trace; trace != nullptr) {
    trace->Add({.begin_ns = begin_ns,
                .end_ns = end_ns,
                .value = activity().epoch.load(std::memory_order_relaxed),
                .detail = call.site,
                .extra = NanosecondsOf(call.enqueued),
                .kind = TraceKind::kCall,
                .name = trace->NameIndex(call.operation)});
  }
  activity().Enter(Phase::kBetweenCalls, end_ns);
  return status;
} catch (...) {
  FailByException();
  return Status(StatusCode::kInternal, "out of memory");
}

void Executor::FailByException() noexcept {
  // A mate may have said already that this rank's call ended too early.
  if (!rank_->failure->Set(std::move(exception_))) LogError("an executor met an exception");
}

void Executor::ExecuteWhileSeated() {
  while (!stopping_.load(std::memory_order_acquire)) {
    std::optional<Call> call = WaitForCall();
    if (!call.has_value()) continue;
    Status status = rank_->failure->status();  // a failed group runs nothing any more
    if (status.ok()) status = RunCall(*call);
    num_executed_.fetch_add(1, std::memory_order_release);
    if (!CompleteAndSit(std::move(*call), std::move(status))) return;
  }
  seat_taken_.store(false, std::memory_order_seq_cst);
}

}  // namespace jax_ep
