#include <algorithm>

#include "proxy/base/thread.h"
#include "xla_ffi/executor.h"

namespace jax_ep {
namespace {

// A call waits up to two periods behind a continuation which blocks. Looks that find nothing double
// the period, so that programs whose continuations never block pay next to nothing for the watch.
constexpr std::chrono::microseconds kShortestPeriod{100};
constexpr std::chrono::microseconds kLongestPeriod{1600};
// Keeps looking for so long after the last reason to: waking it costs more than a few looks.
constexpr int kIdleLooksBeforeSleep = 50;

}  // namespace

Result<std::unique_ptr<ContinuationWatch>> ContinuationWatch::Create() {
  std::unique_ptr<ContinuationWatch> watch(new ContinuationWatch());
  JAX_EP_ASSIGN_OR_RETURN(watch->thread_,
                          StartThread("jax_ep watch", [w = watch.get()] { w->Loop(); }));
  return watch;
}

ContinuationWatch::~ContinuationWatch() {
  stopping_.store(true, std::memory_order_release);
  bell_.Ring();
  if (thread_.joinable()) thread_.join();
}

void ContinuationWatch::Add(Executor* executor) {
  std::lock_guard lock(mutex_);
  watched_.emplace_back(executor, 0);
}

void ContinuationWatch::Remove(Executor* executor) {
  std::lock_guard lock(mutex_);
  std::erase_if(watched_, [&](const auto& watched) { return watched.first == executor; });
}

void ContinuationWatch::Wake() {
  wanted_.store(true, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst)) bell_.Ring();
}

void ContinuationWatch::Loop() {
  const FailureLatch never_failed;
  int idle_looks = 0;
  std::chrono::microseconds period = kShortestPeriod;
  while (!stopping_.load(std::memory_order_acquire)) {
    if (wanted_.exchange(false, std::memory_order_seq_cst)) {
      idle_looks = 0;
    } else if (++idle_looks > kIdleLooksBeforeSleep) {
      asleep_.store(true, std::memory_order_seq_cst);
      (void)WaitUntil(
          bell_,
          [this] {
            return stopping_.load(std::memory_order_acquire) ||
                   wanted_.load(std::memory_order_seq_cst);
          },
          Deadline::After(std::chrono::hours(1)), never_failed);
      asleep_.store(false, std::memory_order_seq_cst);
      period = kShortestPeriod;
      continue;
    }
    std::this_thread::sleep_for(period);
    period = std::min(2 * period, kLongestPeriod);
    std::lock_guard lock(mutex_);
    for (auto& [executor, seen] : watched_) {
      const uint64_t number = executor->blocking_continuation();
      if (number != 0 && number == seen) {
        executor->OfferSeat();
        period = kShortestPeriod;
      }
      if (number != 0) wanted_.store(true, std::memory_order_relaxed);
      seen = number;
    }
  }
}

}  // namespace jax_ep
