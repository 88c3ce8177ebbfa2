// Division by a number that all threads share, as a multiplication: the round-up method of
// Granlund and Montgomery, "Division by invariant integers using multiplication" (PLDI 1994).
#pragma once

#include <cstdint>

namespace jax_ep::gpu {

class Divisor {
 public:
  constexpr Divisor() = default;
  // 1 to 2^31.
  constexpr explicit Divisor(uint32_t divisor) : divisor_(divisor) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    const uint64_t scale = uint64_t{1} << (kDividendBits + shift_);
    factor_ = static_cast<uint32_t>((scale + divisor - 1) / divisor);
  }
  // Dividends are below 2^31.
  constexpr uint32_t Quotient(uint32_t dividend) const {
    // Doubled, so that the upper half of the product is what the factor was made for.
    return static_cast<uint32_t>(uint64_t{2 * dividend} * factor_ >> 32) >> shift_;
  }
  constexpr uint32_t Remainder(uint32_t dividend) const {
    return dividend - Quotient(dividend) * divisor_;
  }

 private:
  static constexpr uint32_t kDividendBits = 31;

  uint32_t divisor_ = 1;
  uint32_t factor_ = uint32_t{1} << kDividendBits;
  uint32_t shift_ = 0;
};

}  // namespace jax_ep::gpu
