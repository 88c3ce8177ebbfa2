// Where in the user's program a call stands: from its name (site.h) to "train.py:42". Python fills
// it when a program is lowered. It is no part of the program: XLA's run ids depend on all that is
// compiled, and processes may call one function from different lines.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace jax_ep {

// Thread rule: any thread. The process has one.
class CallLines {
 public:
  static CallLines& Instance() {
    static CallLines* const lines = new CallLines();  // lives until the process ends
    return *lines;
  }

  void Set(uint64_t name, std::string line) {
    std::lock_guard lock(mutex_);
    lines_[name] = std::move(line);
  }

  // "" if this process has not lowered that program, or it stands in none.
  std::string Find(uint64_t name) const {
    std::lock_guard lock(mutex_);
    const auto it = lines_.find(name);
    return it == lines_.end() ? std::string() : it->second;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, std::string> lines_;
};

inline std::string LineOfCall(uint64_t site) { return CallLines::Instance().Find(site); }

}  // namespace jax_ep
