// Waker: rings the bell of a proxy thread that sleeps while its network has something for it. A
// network library signals a file descriptor, not our futex; a small thread stands between them.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "proxy/base/descriptor.h"
#include "proxy/base/doorbell.h"
#include "proxy/base/status.h"

namespace jax_ep {

// Thread rule: Arm and is_armed on the thread that polls the transport. The bell and the
// descriptors outlive it.
class Waker {
 public:
  // Rings `bell` when something comes to one of `fds`; with `fds` empty (the library has none) a
  // short nap after each Arm. One that merely stays readable is no news: libfabric before 1.18.1
  // never clears a completion queue's own signal (its issue 8947), and proxies would never rest.
  // \error kResourceExhausted  no thread
  // \error kInternal           no descriptor, or one that cannot be waited for
  static Result<std::unique_ptr<Waker>> Create(Doorbell* bell, const std::vector<int>& fds);
  ~Waker();
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;

  // The poller is about to sleep: ring once for the next event. Until the next Arm the thread
  // sleeps itself, so a busy poller is not disturbed.
  void Arm();
  bool is_armed() const { return state_.load(std::memory_order_relaxed) == kArmed; }

 private:
  enum State : uint32_t { kIdle, kArmed, kStopped };

  Waker(Doorbell* bell, bool has_fds) : bell_(bell), has_fds_(has_fds) {}
  Status Open(const std::vector<int>& fds);
  bool Wait();  // for one of the descriptors; false: it cannot
  void Run();   // allocates nothing

  Doorbell* bell_;
  const bool has_fds_;
  Descriptor stop_;    // an eventfd: ends the thread's wait
  Descriptor waited_;  // an epoll: stop_ and, edge-triggered, the library's
  std::atomic<uint32_t> state_{kIdle};
  std::thread thread_;
};

}  // namespace jax_ep
