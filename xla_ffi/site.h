// Call sites: a name for "this custom call of that executable", equal on every device and, within
// one compiled module, on every process. Needed because XLA:CPU runs independent calls in different
// orders on different devices, and because the text of a call does not identify it: sixteen uses of
// one jitted layer are sixteen calls with equal attributes.
//
// XLA instantiates the calls of a module once, in the order of its schedule, on one thread, before
// any of them runs. So the n-th instantiated call of a module is the n-th on every process that
// compiled the same module. Module boundaries come from Python (NoteCompileEnd, driven by JAX's
// compile event) and from the rule that a module whose call has run is complete. That rule speaks
// of the module of that call alone: another may be in the middle of its compilation meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace jax_ep {

struct CallSite {
  uint64_t unique = 0;  // never repeats in this process
  uint64_t module = 0;  // number of its module in this process, from 1
  uint64_t index = 0;   // position among the calls of its module, equal on all processes
};

// Thread rule: any thread. The process has one.
class SiteNumbering {
 public:
  static SiteNumbering& Instance() {
    static SiteNumbering* const numbering = new SiteNumbering();  // lives until the process ends
    return *numbering;
  }

  CallSite Next() {
    std::lock_guard lock(mutex_);
    if (newest_complete_.load(std::memory_order_relaxed) >= module_) {
      ++module_;
      next_index_ = 0;
    }
    return CallSite{.unique = next_unique_++, .module = module_, .index = next_index_++};
  }

  // A compilation has ended: the next instantiated call starts a new module.
  void NoteCompileEnd() {
    std::lock_guard lock(mutex_);
    if (next_index_ > 0) NoteComplete(module_);
  }

  // This call runs, so its module is complete. Cheap: once per module it writes.
  void NoteRun(const CallSite& site) { NoteComplete(site.module); }

 private:
  void NoteComplete(uint64_t module) {
    uint64_t newest = newest_complete_.load(std::memory_order_relaxed);
    while (newest < module && !newest_complete_.compare_exchange_weak(newest, module)) {
    }
  }

  std::mutex mutex_;
  std::atomic<uint64_t> newest_complete_{0};
  uint64_t module_ = 1;
  uint64_t next_unique_ = 1;
  uint64_t next_index_ = 0;
};

}  // namespace jax_ep
