// SipHash-2-4 of one word: a pseudorandom function with a key of 128 bits. Whoever sees some of its
// values learns neither the key nor another value. J.-P. Aumasson and D. J. Bernstein, "SipHash: a
// fast short-input PRF", 2012.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace jax_ep {

using SipKey = std::array<uint64_t, 2>;

// Of the eight bytes of `word`, the lowest first.
constexpr uint64_t SipHash(const SipKey& key, uint64_t word) {
  uint64_t v0 = key[0] ^ 0x736f6d6570736575, v1 = key[1] ^ 0x646f72616e646f6d;
  uint64_t v2 = key[0] ^ 0x6c7967656e657261, v3 = key[1] ^ 0x7465646279746573;
  const auto rounds = [&](int number) {
    for (int i = 0; i < number; ++i) {
      v0 += v1;
      v1 = std::rotl(v1, 13) ^ v0;
      v0 = std::rotl(v0, 32);
      v2 += v3;
      v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3;
      v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1;
      v1 = std::rotl(v1, 17) ^ v2;
      v2 = std::rotl(v2, 32);
    }
  };
  for (const uint64_t block : {word, uint64_t{8} << 56}) {  // the second is the length in bytes
    v3 ^= block;
    rounds(2);
    v0 ^= block;
  }
  v2 ^= 0xff;
  rounds(4);
  return v0 ^ v1 ^ v2 ^ v3;
}

// The authors' vector: key and message are bytes that count from 0.
static_assert(SipHash({0x0706050403020100, 0x0f0e0d0c0b0a0908}, 0x0706050403020100) ==
              0x93f5f5799a932462);

}  // namespace jax_ep
