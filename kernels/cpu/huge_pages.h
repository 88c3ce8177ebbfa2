// Huge pages for the large arrays that operations fill.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jax_ep {

// Asks the kernel to back the whole huge pages inside [begin, begin + num_bytes) with such pages,
// from their first touch on. Only a hint, which changes no content: it does nothing where the
// system has them off or the array is small. (docs/performance_cpu.md)
void PreferHugePages(std::byte* begin, uint64_t num_bytes);

}  // namespace jax_ep
