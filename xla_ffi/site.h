// Call sites: a name for "this custom call of that executable", equal on every device and, within
// one compiled module, on every process. Needed because XLA:CPU runs independent calls in different
// orders on different devices, and because the text of a call does not identify it: sixteen uses of
// one jitted layer are sixteen calls with equal attributes.
//
// XLA instantiates the calls of a module once, in the order of its schedule, on one of its own
// threads; modules that are compiled or loaded at the same time come interleaved. So each call
// carries a key of the module that it was lowered into (jax_ep/_ops/lowering.py), and the n-th
// instantiated call of a module is the n-th on every process that compiled the same module. The
// key is a hash of the lowered program: only equal programs share one.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace jax_ep {

struct CallSite {
  uint64_t unique = 0;  // never repeats in this process
  // Equal on all processes: the key of the module, and this call's position in it.
  uint64_t shared = 0;

  // False if the module was lowered unseen: then `shared` means nothing.
  bool has_key() const { return shared >> 32 != 0; }
};

// Keys have zeros in their lower half, not in the upper one. Thread rule: any thread. The process
// has one.
class SiteNumbering {
 public:
  static SiteNumbering& Instance() {
    static SiteNumbering* const numbering = new SiteNumbering();  // lives until the process ends
    return *numbering;
  }

  // A module is being lowered that will carry `key`: its calls count from zero. Modules that come
  // without this (loaded executables, exported programs) and share a key go on counting.
  void Begin(uint64_t key) {
    std::lock_guard lock(mutex_);
    next_index_[key] = 0;
  }

  CallSite Next(uint64_t key) {
    std::lock_guard lock(mutex_);
    return CallSite{.unique = next_unique_++, .shared = key | next_index_[key]++};
  }

 private:
  std::mutex mutex_;
  uint64_t next_unique_ = 1;
  std::unordered_map<uint64_t, uint32_t> next_index_;  // by key
};

}  // namespace jax_ep
