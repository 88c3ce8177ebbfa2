// Call sites: a name for "this custom call of that executable", equal on every device and, within
// one compiled module, on every process. Needed because XLA:CPU runs independent calls in different
// orders on different devices, and because the text of a call does not identify it: sixteen uses of
// one jitted layer are sixteen calls with equal attributes.
//
// XLA instantiates the calls of a module once, in the order of its schedule, on one thread, before
// any of them runs. So the n-th instantiated call of a module is the n-th on every process that
// compiled the same module. Module boundaries come from Python (NoteCompileEnd, driven by JAX's
// compile event) and from the rule that a module whose call has run is complete.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace jax_ep {

struct CallSite {
  uint64_t unique = 0;  // never repeats in this process
  uint64_t index = 0;   // position among the calls of its module, equal on all processes
};

// Thread rule: any thread. Lives as long as the process (it is part of the session table).
class SiteNumbering {
 public:
  CallSite Next() {
    std::lock_guard lock(mutex_);
    if (module_complete_.exchange(false, std::memory_order_relaxed)) next_index_ = 0;
    return CallSite{.unique = next_unique_++, .index = next_index_++};
  }

  // A compilation has ended, or a call has run: the next instantiated call starts a new module.
  void NoteModuleComplete() {
    if (!module_complete_.load(std::memory_order_relaxed)) {
      module_complete_.store(true, std::memory_order_relaxed);
    }
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> module_complete_{false};
  uint64_t next_unique_ = 1;
  uint64_t next_index_ = 0;
};

}  // namespace jax_ep
