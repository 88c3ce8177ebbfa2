// FailureLatch: the status word of one session. The first failure wins and is never cleared.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "proxy/base/status.h"

namespace jax_ep {

// Thread rule: any thread may call anything. Must outlive every executor, proxy thread and
// monitor of its session. `failed()` is one relaxed-cost load, meant for polling inside waits.
class FailureLatch {
 public:
  // Acquire pairs with the release in Set: a caller that sees true also sees the message.
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  static constexpr int64_t kNobody = -1;

  // Keeps `status` if it is the first failure. Returns true if it was kept. `blamed` is the rank
  // whose fault it was, where that is known: it travels to the other processes and nodes, so that
  // all name the same.
  bool Set(Status status, int64_t blamed = kNobody) {
    std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return false;
    status_ = std::move(status);
    blamed_rank_ = blamed;
    failed_.store(true, std::memory_order_release);
    return true;
  }

  // The first failure, or OK.
  Status status() const {
    if (!failed()) return Status::Ok();
    std::lock_guard lock(mutex_);
    return status_;
  }

  // Of the first failure; kNobody before it.
  int64_t blamed_rank() const {
    if (!failed()) return kNobody;
    std::lock_guard lock(mutex_);
    return blamed_rank_;
  }

 private:
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  Status status_;
  int64_t blamed_rank_ = kNobody;
};

}  // namespace jax_ep
