// What this process is in beside calls: close, create_group or agree of some group. The monitors of
// all its groups show it to node-mates, whose pages would say "in no call" and no more.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace jax_ep {

enum class Stay : uint32_t { kNowhere = 0, kClose = 1, kCreateGroup = 2, kAgree = 3 };

// Activity::elsewhere: a stay, and the number of its group (of "ep[4]#2": 2), 0 if it has none.
constexpr uint64_t PackStay(Stay stay, uint32_t number) {
  return uint64_t{static_cast<uint32_t>(stay)} << 32 | number;
}

// "close of group #2"; "" for nowhere, and for what another version may mean.
inline std::string StayText(uint64_t packed) {
  const char* what = nullptr;
  switch (static_cast<Stay>(packed >> 32)) {
    case Stay::kNowhere:
      break;
    case Stay::kClose:
      what = "close";
      break;
    case Stay::kCreateGroup:
      what = "create_group";
      break;
    case Stay::kAgree:
      what = "agree";
      break;
  }
  if (what == nullptr) return "";
  return std::string(what) + " of group #" + std::to_string(static_cast<uint32_t>(packed));
}

// Thread rule: any thread. No lock, which a forked child could find held. A child has none of its
// parent's stays: the threads that would end them are not there.
class Elsewhere {
 public:
  // More at once, of as many threads, are not shown.
  static constexpr size_t kPlaces = 8;

  // This process's.
  static Elsewhere& Instance() {
    static Elsewhere elsewhere;
    return elsewhere;
  }

  // Returns the place to give to End.
  size_t Begin(Stay stay, uint32_t number) {
    ForgetParent();
    const uint64_t packed = PackStay(stay, number);
    for (size_t place = 0; place < kPlaces; ++place) {
      uint64_t free = 0;
      if (stays_[place].compare_exchange_strong(free, packed, std::memory_order_relaxed)) {
        return place;
      }
    }
    return kPlaces;
  }
  void End(size_t place) {
    if (place < kPlaces) stays_[place].store(0, std::memory_order_relaxed);
  }

  // One of them, packed; 0: there is none.
  uint64_t Get() {
    ForgetParent();
    for (const auto& stay : stays_) {
      if (const uint64_t packed = stay.load(std::memory_order_relaxed); packed != 0) return packed;
    }
    return 0;
  }

 private:
  void ForgetParent() {
    const pid_t own = getpid();
    if (process_.exchange(own, std::memory_order_relaxed) == own) return;
    for (auto& stay : stays_) stay.store(0, std::memory_order_relaxed);
  }

  std::atomic<pid_t> process_{getpid()};
  std::array<std::atomic<uint64_t>, kPlaces> stays_{};
};

}  // namespace jax_ep
