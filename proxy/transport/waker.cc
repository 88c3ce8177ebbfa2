#include "proxy/transport/waker.h"

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <string>

#include "proxy/base/thread.h"

namespace jax_ep {
namespace {

// How late an event is seen where the network library gives no descriptor to wait for.
constexpr timespec kNap{.tv_sec = 0, .tv_nsec = 50'000};

}  // namespace

Result<std::unique_ptr<Waker>> Waker::Create(Doorbell* bell, const std::vector<int>& fds) {
  const int stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (stop_fd < 0) return Internal(std::string("eventfd: ") + strerror(errno));
  std::unique_ptr<Waker> waker(new Waker(bell, fds, stop_fd));
  JAX_EP_ASSIGN_OR_RETURN(waker->thread_,
                          StartThread("jax_ep waker", [w = waker.get()] { w->Run(); }));
  return waker;
}

Waker::Waker(Doorbell* bell, const std::vector<int>& fds, int stop_fd)
    : bell_(bell), has_fds_(!fds.empty()), stop_fd_(stop_fd) {
  waited_.push_back({.fd = stop_fd, .events = POLLIN, .revents = 0});
  for (const int fd : fds) waited_.push_back({.fd = fd, .events = POLLIN, .revents = 0});
}

Waker::~Waker() {
  state_.store(kStopped, std::memory_order_release);
  state_.notify_all();
  const uint64_t one = 1;
  // It cannot fail: the counter of an eventfd that is written once does not overflow.
  [[maybe_unused]] const ssize_t num_written = write(stop_fd_, &one, sizeof(one));
  if (thread_.joinable()) thread_.join();
  close(stop_fd_);
}

void Waker::Arm() {
  uint32_t expected = kIdle;
  if (state_.compare_exchange_strong(expected, kArmed, std::memory_order_release,
                                     std::memory_order_relaxed)) {
    state_.notify_one();
  }
}

void Waker::Run() {
  while (true) {
    state_.wait(kIdle, std::memory_order_acquire);
    if (state_.load(std::memory_order_acquire) == kStopped) return;
    if (ppoll(waited_.data(), waited_.size(), has_fds_ ? nullptr : &kNap, nullptr) < 0 &&
        errno != EINTR) {
      return;  // the proxy still looks every kMaxSleep
    }
    uint32_t expected = kArmed;
    if (!state_.compare_exchange_strong(expected, kIdle, std::memory_order_relaxed)) continue;
    bell_->Ring();
  }
}

}  // namespace jax_ep
