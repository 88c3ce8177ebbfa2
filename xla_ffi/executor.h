// One executor per (group, local rank): runs that rank's calls in the order that the team agreed on
// (order.h) and completes their futures.
//
// XLA runs the continuation of a future inline where it is completed. A continuation usually ends
// soon, often after it has enqueued the rank's next call here; but it may also block in a native
// collective that needs this very rank. So each rank has two threads and one seat. Who sits
// executes calls; after a call it leaves the seat, runs the continuation, and sits down again. If
// the continuation does not return while a call is waiting, the other thread takes the free seat:
// at once if the call came from elsewhere, else when the ContinuationWatch has seen one
// continuation for a whole period. In a loop of calls no thread is ever woken.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "kernels/launch.h"
#include "xla_ffi/order.h"

namespace jax_ep {

class ContinuationWatch;

// One call of an FFI handler, detached from XLA: what to run and whom to tell.
struct Call {
  OrderEntry key{};
  uint64_t site = 0;  // its name in its program, equal on all processes (CallSite::shared)
  const char* operation = "";
  std::function<Status(Rank&)> run;
  std::function<void(Status)> complete;              // may run arbitrary XLA code, may block
  std::chrono::steady_clock::time_point enqueued{};  // set by Enqueue
};

// Thread rule: Enqueue, Refuse and Stop from any thread. The Rank's heaps, the latch and the watch
// must outlive it.
class Executor {
 public:
  // \error kResourceExhausted  no thread
  static Result<std::unique_ptr<Executor>> Create(std::unique_ptr<Rank> rank,
                                                  std::unique_ptr<AgreedOrder> order,
                                                  ContinuationWatch* watch);
  ~Executor();  // Stop()
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Never blocks. After Refuse or Stop the call completes with the reason given there.
  void Enqueue(Call call);

  // No call is taken any more; those that wait or run go on.
  void Refuse(const Status& reason);

  // Fails what is still queued with `reason`, joins both threads. Idempotent. A running call is
  // waited for: its own waits are bounded, and the session latches a failure first when it must
  // end.
  void Stop(const Status& reason);

  Rank& rank() { return *rank_; }
  size_t num_queued() const;
  // When the call came that has waited longest for its turn (MonotonicNs), or 0.
  uint64_t oldest_queued_ns() const;
  // Calls taken from XLA so far: executed, running and queued.
  uint64_t num_enqueued() const { return num_enqueued_.load(std::memory_order_acquire); }
  // Calls executed so far, by any operation.
  uint64_t num_executed() const { return num_executed_.load(std::memory_order_acquire); }
  // The call that this rank cannot end without its peers, if any: its number, counted from 1.
  uint64_t num_needed() const;

  // For the watch: number of the continuation that keeps a queued call waiting, or 0.
  uint64_t blocking_continuation() const;
  // For the watch: lets the other thread take the seat, if it is free.
  void OfferSeat();

 private:
  Executor(std::unique_ptr<Rank> rank, std::unique_ptr<AgreedOrder> order,
           ContinuationWatch* watch);
  void ThreadLoop();
  // Sits until stopped or until the other thread took the seat during a continuation.
  void ExecuteWhileSeated();
  // The next call in the agreed order, if it is known (or this rank may announce one) and has
  // arrived.
  std::optional<Call> TakeNext() noexcept;
  // Waits for the next call; empty when there is something else to look at first.
  std::optional<Call> WaitForCall();
  // Latches an error if a queued call has waited longer than the group's timeout for its turn.
  void CheckOverdue() noexcept;
  void FailQueued(const Status& reason);  // at the end only
  Status RunCall(Call& call) noexcept;
  // What the functions above throw fails the group: its ranks wait for this one.
  void FailByException() noexcept;
  // Leaves the seat, runs the continuation, tries to sit down again.
  bool CompleteAndSit(Call call, Status status);
  bool TrySit();
  ControlBlock& control() const;
  Doorbell& doorbell() const { return control().doorbell; }
  Activity& activity() const { return control().activity; }

  std::unique_ptr<Rank> rank_;
  std::unique_ptr<AgreedOrder> order_;
  Status exception_;  // made while there was memory
  ContinuationWatch* const watch_;

  mutable std::mutex queue_mutex_;
  std::deque<Call> queue_;  // in arrival order
  std::atomic<uint64_t> num_queued_{0};
  std::atomic<uint64_t> num_enqueued_{0};
  std::atomic<uint64_t> num_taken_{0};  // from the queue; the newest runs, or has been executed
  std::atomic<uint64_t> num_executed_{0};
  std::atomic<bool> stopping_{false};
  bool refuses_ = false;  // guarded by queue_mutex_, like the next
  Status reason_;         // of Refuse or Stop, whichever came first

  std::atomic<bool> seat_taken_{false};
  std::atomic<uint64_t> continuation_{0};  // number of the newest continuation
  std::mutex seat_mutex_;
  std::condition_variable seat_offered_;
  bool offer_ = false;

  std::vector<std::thread> threads_;
};

// One thread per session that looks, while calls are waiting behind continuations, whether one of
// them has been at it for a whole period, and then offers that rank's seat to its other thread.
class ContinuationWatch {
 public:
  // \error kResourceExhausted  no thread
  static Result<std::unique_ptr<ContinuationWatch>> Create();
  ~ContinuationWatch();  // joins; executors must be stopped before
  ContinuationWatch(const ContinuationWatch&) = delete;
  ContinuationWatch& operator=(const ContinuationWatch&) = delete;

  void Add(Executor* executor);
  void Remove(Executor* executor);
  // A call waits behind a continuation: look from now on (cheap when it looks already).
  void Wake();

 private:
  ContinuationWatch() = default;
  void Loop();

  std::mutex mutex_;
  std::vector<std::pair<Executor*, uint64_t>> watched_;  // and the continuation seen last
  std::atomic<bool> asleep_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> wanted_{false};
  Doorbell bell_{};
  std::thread thread_;
};

}  // namespace jax_ep
