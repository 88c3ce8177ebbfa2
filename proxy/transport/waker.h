// Waker: rings the bell of a proxy thread that sleeps while its network has something for it. A
// network library signals a file descriptor, not our futex; a small thread stands between them.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "proxy/base/doorbell.h"
#include "proxy/base/status.h"

namespace jax_ep {

// Thread rule: Arm and is_armed on the thread that polls the transport. The bell and the
// descriptors outlive it.
class Waker {
 public:
  // Rings `bell` when one of `fds` becomes readable; with `fds` empty (the library has none) a
  // short nap after each Arm.
  // \error kResourceExhausted  no thread
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

  Waker(Doorbell* bell, const std::vector<int>& fds, int stop_fd);
  void Run();  // allocates nothing

  Doorbell* bell_;
  const bool has_fds_;
  std::vector<pollfd> waited_;  // stop_fd_, then the descriptors
  int stop_fd_;                 // an eventfd: ends the thread's wait
  std::atomic<uint32_t> state_{kIdle};
  std::thread thread_;
};

}  // namespace jax_ep
