#include "kernels/cpu/huge_pages.h"

#include <sys/mman.h>

#include "kernels/layout.h"

namespace jax_ep {
namespace {

// Of x86-64 and of arm64 with 4 KiB pages. Where huge pages are larger, the kernel rounds inwards.
constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
// Smaller arrays come from an allocator's shared areas and are reused: they fault rarely.
constexpr uint64_t kFromBytes = uint64_t{4} << 20;

}  // namespace

void PreferHugePages(std::byte* begin, uint64_t num_bytes) {
  if (begin == nullptr || num_bytes < kFromBytes) return;
  const auto address = reinterpret_cast<uint64_t>(begin);
  const uint64_t first = AlignUp(address, kHugePageBytes);
  const uint64_t end = (address + num_bytes) / kHugePageBytes * kHugePageBytes;
  // It may fail (EINVAL: huge pages are off, or not this kind of memory): then nothing changes.
  madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

}  // namespace jax_ep
