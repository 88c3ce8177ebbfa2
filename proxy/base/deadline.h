// Deadline: a point in time that a bounded wait must not pass.
#pragma once

#include <algorithm>
#include <chrono>

namespace jax_ep {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline After(std::chrono::nanoseconds timeout) {
    return Deadline(Clock::now() + timeout);
  }

  bool expired() const { return Clock::now() >= at_; }
  // Time left, never negative.
  std::chrono::nanoseconds remaining() const {
    return std::max(std::chrono::nanoseconds(0),
                    std::chrono::duration_cast<std::chrono::nanoseconds>(at_ - Clock::now()));
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace jax_ep
