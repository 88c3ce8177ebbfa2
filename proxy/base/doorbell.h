// Doorbell: how a thread sleeps until some memory that others write has changed.
// A Doorbell lives in (possibly shared) memory, beside the words it announces.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "proxy/base/deadline.h"
#include "proxy/base/failure.h"
#include "proxy/base/proxy_port.h"

namespace jax_ep {

// Zero-initialised memory is a valid Doorbell. Works across processes (shared futex).
struct alignas(64) Doorbell {
  std::atomic<uint32_t> count;    // bumped by Ring
  std::atomic<uint32_t> waiters;  // threads that sleep or are about to

  // Call after the store that a waiter waits for. The seq_cst pair (Ring: store data, bump count,
  // read waiters; Wait: bump waiters, read count, read data) makes a lost wake-up impossible.
  void Ring() {
    count.fetch_add(1, std::memory_order_seq_cst);
    if (waiters.load(std::memory_order_seq_cst) != 0) {
      syscall(SYS_futex, &count, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }
  }
};
static_assert(sizeof(Doorbell) == 64, "a doorbell owns its cache line");

// Rounds of each cheap phase before a waiter sleeps. On few cores long spins only steal time from
// the thread that is waited for (benchmarks/bench_ll.py), so both are small.
inline constexpr int kSpinRounds = 64;
inline constexpr int kYieldRounds = 8;
// Longest single sleep: bounds how late a waiter sees a failure latched without a Ring.
inline constexpr std::chrono::milliseconds kMaxSleep{20};

enum class WaitResult : uint8_t { kReady, kFailed, kTimeout };

// Looks often, then seldom. Returns whether ready() was seen.
template <typename Ready>
bool SpinUntil(Ready&& ready) {
  for (int round = 0; round < kSpinRounds; ++round) {
    if (ready()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  for (int round = 0; round < kYieldRounds; ++round) {
    if (ready()) return true;
    std::this_thread::yield();
  }
  return false;
}

// Waits until ready() is true: spin -> pause -> yield -> futex. `ready` must be cheap, without
// side effects, and read with acquire what it tests. kFailed when `failure` is latched.
// `proxy`, if any, is what makes `ready` true: it is helped where that pays (proxy_port.h).
template <typename Ready>
WaitResult WaitUntil(Doorbell& bell, Ready&& ready, const Deadline& deadline,
                     const FailureLatch& failure, ProxyPort* proxy = nullptr) {
  const bool helps = proxy != nullptr && proxy->wants_help();
  if (helps ? HelpUntil(*proxy, ready) : SpinUntil(ready)) return WaitResult::kReady;
  while (true) {
    bell.waiters.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = bell.count.load(std::memory_order_seq_cst);
    const bool done = ready();
    const bool failed = !done && failure.failed();
    const auto left = deadline.remaining();
    if (!done && !failed && left.count() > 0) {
      const auto sleep = std::min<std::chrono::nanoseconds>(left, kMaxSleep);
      timespec timeout{.tv_sec = 0, .tv_nsec = static_cast<long>(sleep.count())};
      syscall(SYS_futex, &bell.count, FUTEX_WAIT, seen, &timeout, nullptr, 0);
    }
    bell.waiters.fetch_sub(1, std::memory_order_seq_cst);
    if (done || ready()) return WaitResult::kReady;
    if (failed) return WaitResult::kFailed;
    if (left.count() <= 0) return WaitResult::kTimeout;
  }
}

}  // namespace jax_ep
