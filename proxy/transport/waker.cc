#include "proxy/transport/waker.h"

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "proxy/base/thread.h"
#include "proxy/transport/side_socket.h"

namespace jax_ep {
namespace {

// How late an event is seen where the network library gives no descriptor to wait for.
constexpr timespec kNap{.tv_sec = 0, .tv_nsec = 50'000};
// Taken at once; more of them ring the bell once more.
constexpr int kMaxEvents = 8;

}  // namespace

Result<std::unique_ptr<Waker>> Waker::Create(Doorbell* bell, const std::vector<int>& fds) {
  std::unique_ptr<Waker> waker(new Waker(bell, !fds.empty()));
  JAX_EP_RETURN_IF_ERROR(waker->Open(fds));
  JAX_EP_ASSIGN_OR_RETURN(waker->thread_,
                          StartThread("jax_ep waker", [w = waker.get()] { w->Run(); }));
  return waker;
}

Status Waker::Open(const std::vector<int>& fds) {
  stop_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (stop_.fd() < 0) return Internal(Errno("eventfd"));
  waited_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  if (waited_.fd() < 0) return Internal(Errno("epoll_create1"));
  epoll_event event{.events = EPOLLIN, .data = {}};
  if (epoll_ctl(waited_.fd(), EPOLL_CTL_ADD, stop_.fd(), &event) != 0) {
    return Internal(Errno("epoll_ctl"));
  }
  event.events = EPOLLIN | EPOLLET;
  for (const int fd : fds) {
    if (epoll_ctl(waited_.fd(), EPOLL_CTL_ADD, fd, &event) != 0) {
      return Internal(Errno("waiting for the network's descriptor"));
    }
  }
  return Status::Ok();
}

Waker::~Waker() {
  state_.store(kStopped, std::memory_order_release);
  state_.notify_all();
  const uint64_t one = 1;
  // It cannot fail: the counter of an eventfd that is written once does not overflow.
  [[maybe_unused]] const ssize_t num_written = write(stop_.fd(), &one, sizeof(one));
  if (thread_.joinable()) thread_.join();
}

void Waker::Arm() {
  uint32_t expected = kIdle;
  if (state_.compare_exchange_strong(expected, kArmed, std::memory_order_release,
                                     std::memory_order_relaxed)) {
    state_.notify_one();
  }
}

bool Waker::Wait() {
  if (!has_fds_) {
    pollfd stop{.fd = stop_.fd(), .events = POLLIN, .revents = 0};
    return ppoll(&stop, 1, &kNap, nullptr) >= 0 || errno == EINTR;
  }
  epoll_event events[kMaxEvents];
  return epoll_wait(waited_.fd(), events, kMaxEvents, -1) >= 0 || errno == EINTR;
}

void Waker::Run() {
  while (true) {
    state_.wait(kIdle, std::memory_order_acquire);
    if (state_.load(std::memory_order_acquire) == kStopped) return;
    if (!Wait()) return;  // the proxy still looks every kMaxSleep
    uint32_t expected = kArmed;
    if (!state_.compare_exchange_strong(expected, kIdle, std::memory_order_relaxed)) continue;
    bell_->Ring();
  }
}

}  // namespace jax_ep
