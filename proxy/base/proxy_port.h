// ProxyPort: what the threads around a proxy need of it. The proxy itself is proxy/proxy.h.
#pragma once

#include <thread>

namespace jax_ep {

// A thread that waits for what the proxy brings may do the proxy's work meanwhile ("caller
// progress", as message-passing libraries have it): a message then costs no switch to the proxy
// thread and back. Nobody depends on that help; states and wake-ups: proxy/progress.h. Any thread
// may call any of these.
class ProxyPort {
 public:
  virtual ~ProxyPort() = default;

  // Commands were pushed to a ring of this proxy. A few of them are posted at once, on the calling
  // thread, if the proxy thread pauses; else the thread is woken. Waits for nothing.
  virtual void Kick() = 0;

  // Whether Help is worth its while: the network does not wake the proxy thread cheaply, and
  // JAX_EP_CALLER_PROGRESS is not 0.
  virtual bool wants_help() const = 0;
  // Between the two the proxy thread leaves the rounds to Help as far as it finds no work itself.
  // `leaves_work`: the proxy thread must take over at once, not at the end of its nap.
  virtual void BeginHelp() = 0;
  virtual void EndHelp(bool leaves_work) = 0;
  // One round of the proxy, unless another thread is in one. Never blocks. Whether it did anything.
  virtual bool Help() = 0;
};

// Rounds, each with a yield, before the proxy thread or a helper sleeps, where the network wakes
// the proxy through another thread: that costs two switches. They do not spin before: a round of a
// network is a system call or competes with the kernel's network threads, and what is waited for
// may need this core.
inline constexpr int kNetworkYieldRounds = 192;
// A helper that did more rounds with work than this stood in a stream, whose rest the proxy thread
// must go on to receive.
inline constexpr int kStreamRounds = 8;

// Helps `proxy` until ready() or kNetworkYieldRounds. Returns whether ready() was seen.
template <typename Ready>
bool HelpUntil(ProxyPort& proxy, Ready&& ready) {
  proxy.BeginHelp();
  bool is_ready = ready();
  int num_busy = 0;
  for (int round = 0; round < kNetworkYieldRounds && !is_ready; ++round) {
    num_busy += proxy.Help() ? 1 : 0;
    is_ready = ready();
    if (!is_ready) std::this_thread::yield();
  }
  proxy.EndHelp(!is_ready || num_busy > kStreamRounds);
  return is_ready;
}

}  // namespace jax_ep
