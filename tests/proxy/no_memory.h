// Allocations that fail, as where memory is used up. Replaces operator new of the test's
// executable: include it in its one source file.
#pragma once

#include <climits>
#include <cstdlib>
#include <new>

namespace jax_ep {

// How many of the next allocations by `new` of the calling thread fail; INT_MAX: all.
inline thread_local int num_failing_allocations = 0;

}  // namespace jax_ep

// Not inlined: GCC takes malloc and delete, or new and free, for a mismatch. The form that does not
// throw is replaced, too: under AddressSanitizer it would be the sanitizer's own, and its memory
// not for this delete.
[[gnu::noinline]] void* operator new(std::size_t num_bytes, const std::nothrow_t&) noexcept {
  int& num_failing = jax_ep::num_failing_allocations;
  const bool fails = num_failing > 0;
  if (fails && num_failing != INT_MAX) --num_failing;
  return fails ? nullptr : std::malloc(num_bytes);
}
[[gnu::noinline]] void* operator new(std::size_t num_bytes) {
  void* const memory = operator new(num_bytes, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
