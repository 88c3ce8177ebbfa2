// Call sites: a name for "this custom call of that executable", equal on every device and, for one
// program, on every process. Needed because XLA:CPU runs independent calls in different orders on
// different devices, and because XLA instantiates the calls of programs that are compiled at the
// same time in any order.
//
// So the program itself carries the names: where it is lowered, each call gets a hash of the whole
// program and, below it, its number in it (jax_ep/_jax_compat.py, call_primitive). Only equal
// programs share names, and XLA's run ids tell their executions apart.
//
// Only a program for jax.export carries no numbers, as another may call it several times: its calls
// count on in the order in which they are instantiated, so every process must compile it equally
// often. (In programs for GPUs alone names only serve reports: calls of one function share theirs.)
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace jax_ep {

struct CallSite {
  uint64_t unique = 0;  // never repeats in this process
  uint64_t shared = 0;  // equal on all processes: the key of the program, and the call's number

  // False if the program was lowered unseen: then `shared` means nothing.
  bool has_key() const { return shared >> 32 != 0; }
};

// Thread rule: any thread. The process has one.
class SiteNumbering {
 public:
  static SiteNumbering& Instance() {
    static SiteNumbering* const numbering = new SiteNumbering();  // lives until the process ends
    return *numbering;
  }

  // For each call that is instantiated. `name`: the key of its program in the upper half, its
  // number there in the lower one, or 0 if it has none.
  CallSite Next(uint64_t name) {
    std::lock_guard lock(mutex_);
    const bool is_numbered = static_cast<uint32_t>(name) != 0;
    return CallSite{.unique = next_unique_++,
                    .shared = is_numbered ? name : name | next_number_[name]++};
  }

 private:
  std::mutex mutex_;
  uint64_t next_unique_ = 1;
  std::unordered_map<uint64_t, uint32_t> next_number_;  // by key, of programs without numbers
};

}  // namespace jax_ep
