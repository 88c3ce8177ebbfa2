// A system without threads, for tests.
#pragma once

#include <pthread.h>

#include <cstddef>

namespace jax_ep {

// While it lives the system gives no thread: each asks for a stack that no address space has.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&saved_);
    pthread_attr_t huge;
    pthread_getattr_default_np(&huge);
    pthread_attr_setstacksize(&huge, size_t{1} << 60);
    pthread_setattr_default_np(&huge);
    pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&saved_);
    pthread_attr_destroy(&saved_);
  }

 private:
  pthread_attr_t saved_;
};

}  // namespace jax_ep
