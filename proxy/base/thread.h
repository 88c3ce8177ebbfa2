// StartThread: a thread, or an error. std::thread throws where the system has none left, and an
// exception that nobody expects ends the process.
#pragma once

#include <pthread.h>

#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "proxy/base/status.h"

namespace jax_ep {

// Runs `body` on a thread that tools show as `name` (at most 15 characters).
// \error kResourceExhausted  the system gives no thread (limits of processes, pids or memory)
template <typename Body>
Result<std::thread> StartThread(const char* name, Body&& body) try {
  return std::thread([name, body = std::forward<Body>(body)]() mutable {
    (void)pthread_setname_np(pthread_self(), name);
    body();
  });
} catch (const std::system_error& error) {
  return ResourceExhausted(std::string("could not start the thread ") + name + " (" +
                           error.code().message() +
                           "); raise ulimit -u (processes), ulimit -v (memory) or the pids limit "
                           "of the container, or use fewer groups, ranks per process or "
                           "JAX_EP_THREADS_PER_RANK");
} catch (const std::bad_alloc&) {
  return ResourceExhausted(std::string("could not start the thread ") + name + " (out of memory)");
}

}  // namespace jax_ep
