#include "xla_ffi/executor.h"

#include <algorithm>
#include <utility>

namespace jax_ep {
namespace {

// How often an executor with nothing to do looks at its queue's age; wake-ups come by doorbell.
constexpr std::chrono::seconds kOverdueCheckPeriod{1};

}  // namespace

Executor::Executor(std::unique_ptr<Rank> rank, std::unique_ptr<AgreedOrder> order)
    : rank_(std::move(rank)), order_(std::move(order)) {
  executor_ = std::thread([this] { ExecutorLoop(); });
  completer_ = std::thread([this] { CompleterLoop(); });
}

Executor::~Executor() { Stop(FailedPrecondition("group " + rank_->group_name + " is closed")); }

Doorbell& Executor::doorbell() const {
  return reinterpret_cast<ControlBlock*>(rank_->heaps[rank_->rank])->doorbell;
}

void Executor::Enqueue(Call call) {
  call.enqueued = std::chrono::steady_clock::now();
  {
    std::unique_lock lock(queue_mutex_);
    if (stopping_.load(std::memory_order_relaxed)) {
      const Status reason = stop_reason_;
      lock.unlock();
      call.complete(reason);
      return;
    }
    queue_.push_back(std::move(call));
    num_enqueued_.fetch_add(1, std::memory_order_release);
  }
  doorbell().Ring();
}

size_t Executor::num_queued() const {
  std::lock_guard lock(queue_mutex_);
  return queue_.size();
}

void Executor::Stop(const Status& reason) {
  {
    std::lock_guard lock(queue_mutex_);
    if (!stopping_.load(std::memory_order_relaxed)) {
      stop_reason_ = reason;
      stopping_.store(true, std::memory_order_release);
    }
  }
  doorbell().Ring();
  if (executor_.joinable()) executor_.join();
  if (completer_.joinable()) completer_.join();
}

std::optional<Call> Executor::TakeNext() {
  std::optional<Call> taken;
  if (order_->announces()) {
    std::lock_guard lock(queue_mutex_);
    if (queue_.empty()) return std::nullopt;
    taken = std::move(queue_.front());
    queue_.pop_front();
  } else {
    // Peek even with an empty queue: a node leader passes announcements on to its mates here.
    const std::optional<OrderEntry> entry = order_->Peek();
    if (!entry.has_value()) return std::nullopt;
    std::lock_guard lock(queue_mutex_);
    // First of equal keys: a site repeats only in a loop, whose iterations XLA runs in order.
    const auto it = std::find_if(queue_.begin(), queue_.end(), [&](const Call& call) {
      return call.key.run_id == entry->run_id && call.key.site == entry->site;
    });
    if (it == queue_.end()) return std::nullopt;
    taken = std::move(*it);
    queue_.erase(it);
    order_->Advance();
  }
  num_enqueued_.fetch_sub(1, std::memory_order_relaxed);
  return taken;
}

void Executor::CheckOverdue() {
  std::string message;
  {
    std::lock_guard lock(queue_mutex_);
    if (queue_.empty()) return;
    const Call& oldest = queue_.front();
    if (std::chrono::steady_clock::now() - oldest.enqueued < rank_->timeout) return;
    const std::optional<OrderEntry> next = order_->announces() ? std::nullopt : order_->Peek();
    message = "group " + rank_->group_name + ": " + oldest.operation + " on rank " +
              std::to_string(rank_->rank) + " waited longer than timeout_s for its turn: ";
    message += next.has_value()
                   ? "the call that rank 0 announced next (position " +
                         std::to_string(order_->position()) + ", site " +
                         std::to_string(next->site) + ") has not reached this rank; it has " +
                         std::to_string(queue_.size()) + " other call(s) waiting"
                   : "rank 0 announced no further call (" + std::to_string(order_->position()) +
                         " executed); is every process running the same program?";
  }
  rank_->failure->Set(DeadlineExceeded(std::move(message)));
}

void Executor::FailQueued(const Status& reason) {
  std::deque<Call> failed;
  {
    std::lock_guard lock(queue_mutex_);
    failed.swap(queue_);
    num_enqueued_.store(0, std::memory_order_relaxed);
  }
  for (Call& call : failed) Finish(std::move(call), reason);
}

void Executor::Finish(Call call, Status status) {
  {
    std::lock_guard lock(completion_mutex_);
    completions_.push_back({std::move(call.complete), std::move(status)});
  }
  completion_ready_.notify_one();
}

void Executor::ExecutorLoop() {
  std::optional<Call> next;
  // Acquire pairs with the release in Stop (stopping_) and Enqueue (num_enqueued_).
  const auto ready = [&] {
    if (stopping_.load(std::memory_order_acquire)) return true;
    const bool may_have_work = num_enqueued_.load(std::memory_order_acquire) != 0 ||
                               (!order_->announces() && rank_->local_rank() == 0);
    if (may_have_work) next = TakeNext();
    return next.has_value();
  };
  while (!stopping_.load(std::memory_order_acquire)) {
    const WaitResult result =
        WaitUntil(doorbell(), ready, Deadline::After(kOverdueCheckPeriod), *rank_->failure);
    if (next.has_value()) {
      Call call = std::move(*next);
      next.reset();
      Status status = rank_->failure->status();
      if (status.ok() && order_->announces()) status = order_->Announce(call.key);
      if (status.ok()) status = call.run(*rank_);
      num_executed_.fetch_add(1, std::memory_order_relaxed);
      Finish(std::move(call), std::move(status));
    } else if (result == WaitResult::kFailed) {
      FailQueued(rank_->failure->status());
      // The latch is never cleared: sleep on the doorbell, not on the latch.
      FailureLatch never_failed;
      (void)WaitUntil(
          doorbell(),
          [&] {
            return stopping_.load(std::memory_order_acquire) ||
                   num_enqueued_.load(std::memory_order_acquire) != 0;
          },
          Deadline::After(kOverdueCheckPeriod), never_failed);
    } else {
      CheckOverdue();
    }
  }
  FailQueued(stop_reason_);
  {
    std::lock_guard lock(completion_mutex_);
    executor_done_ = true;
  }
  completion_ready_.notify_one();
}

void Executor::CompleterLoop() {
  std::unique_lock lock(completion_mutex_);
  while (true) {
    completion_ready_.wait(lock, [&] { return !completions_.empty() || executor_done_; });
    if (completions_.empty()) return;
    Completion completion = std::move(completions_.front());
    completions_.pop_front();
    lock.unlock();
    completion.complete(std::move(completion.status));
    lock.lock();
  }
}

}  // namespace jax_ep
