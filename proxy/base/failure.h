// FailureLatch: the status word of one session. The first failure wins and is never cleared.
#pragma once

#include <atomic>
#include <mutex>

#include "proxy/base/status.h"

namespace jax_ep {

// Thread rule: any thread may call anything. Must outlive every executor, proxy thread and
// monitor of its session. `failed()` is one relaxed-cost load, meant for polling inside waits.
class FailureLatch {
 public:
  // Acquire pairs with the release in Set: a caller that sees true also sees the message.
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // Keeps `status` if it is the first failure. Returns true if it was kept.
  bool Set(Status status) {
    std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return false;
    status_ = std::move(status);
    failed_.store(true, std::memory_order_release);
    return true;
  }

  // The first failure, or OK.
  Status status() const {
    if (!failed()) return Status::Ok();
    std::lock_guard lock(mutex_);
    return status_;
  }

 private:
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  Status status_;
};

}  // namespace jax_ep
