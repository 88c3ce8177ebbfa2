// One executor per (group, local rank): runs that rank's calls in the order that the team agreed on
// (order.h) and completes their futures from a second thread, because XLA runs continuations inline
// and a continuation may block in a native collective that needs this very rank.
#pragma once

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

// One call of an FFI handler, detached from XLA: what to run and whom to tell.
struct Call {
  OrderEntry key{};
  const char* operation = "";
  std::function<Status(Rank&)> run;
  std::function<void(Status)> complete;  // may run arbitrary XLA code, may block
  std::chrono::steady_clock::time_point enqueued{};  // set by Enqueue
};

// Thread rule: Enqueue and Stop from any thread. The Rank, its heaps and the latch must outlive it.
class Executor {
 public:
  Executor(std::unique_ptr<Rank> rank, std::unique_ptr<AgreedOrder> order);
  ~Executor();  // Stop()
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Never blocks. After Stop the call completes with the reason given there.
  void Enqueue(Call call);

  // Fails what is still queued with `reason`, joins both threads. Idempotent. A running call is
  // waited for: its own waits are bounded, and the session latches a failure first when it must end.
  void Stop(const Status& reason);

  Rank& rank() { return *rank_; }
  size_t num_queued() const;
  // Calls executed so far, by any operation.
  uint64_t num_executed() const { return num_executed_.load(std::memory_order_relaxed); }

 private:
  struct Completion {
    std::function<void(Status)> complete;
    Status status;
  };

  void ExecutorLoop();
  void CompleterLoop();
  // The next call in the agreed order if it is known and has arrived. Rank 0 announces it.
  std::optional<Call> TakeNext();
  // Latches an error if a queued call has waited longer than the group's timeout for its turn.
  void CheckOverdue();
  void FailQueued(const Status& reason);
  void Finish(Call call, Status status);
  Doorbell& doorbell() const;

  std::unique_ptr<Rank> rank_;
  std::unique_ptr<AgreedOrder> order_;

  mutable std::mutex queue_mutex_;
  std::deque<Call> queue_;  // in arrival order
  std::atomic<uint64_t> num_enqueued_{0};
  std::atomic<uint64_t> num_executed_{0};
  std::atomic<bool> stopping_{false};
  Status stop_reason_;

  std::mutex completion_mutex_;
  std::condition_variable completion_ready_;
  std::deque<Completion> completions_;
  bool executor_done_ = false;

  std::thread executor_;
  std::thread completer_;
};

}  // namespace jax_ep
