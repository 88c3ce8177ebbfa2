// How launchers prepare and launch kernels: what is the same for all of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "kernels/layout.h"

namespace jax_ep::gpu {

// A text that lives until the thread's next call.
const char* KeepText(std::string text);
// nullptr, or what the last launch of this thread said.
const char* LaunchResult(const char* kernel);
// Kernels that this thread has launched since it asked last.
uint32_t TakeLaunchCount();

// Allows `kernel` that much dynamic shared memory at least, as other groups of the process launch
// it too, and loads it on the current device.
const char* PrepareKernel(const void* kernel, uint32_t shared_bytes);
template <typename... Params>
const char* PrepareKernel(void (*kernel)(Params...), uint32_t shared_bytes) {
  return PrepareKernel(reinterpret_cast<const void*>(kernel), shared_bytes);
}
// Several kernels, up to the first that fails.
template <typename... Kernels>
const char* PrepareKernels(uint32_t shared_bytes, Kernels... kernels) {
  const char* error = nullptr;
  static_cast<void>(((error = PrepareKernel(kernels, shared_bytes)) || ...));
  return error;
}

// Blocks for `items`, of which one block handles `items_per_block` at once: 1 to `most`.
constexpr uint32_t BlocksFor(uint64_t items, uint64_t items_per_block, uint64_t most) {
  return static_cast<uint32_t>(std::clamp<uint64_t>(DivideUp(items, items_per_block), 1, most));
}
// Blocks of a grid that copies bytes, 64 KiB or more each.
constexpr uint32_t BlocksForCopy(uint64_t num_bytes, uint32_t most) {
  constexpr uint64_t kBytesPerBlock = uint64_t{64} << 10;
  return static_cast<uint32_t>(std::clamp<uint64_t>(num_bytes / kBytesPerBlock, 1, most));
}

inline constexpr uint64_t kWordBytes = 16;  // that a lane loads or stores at once, at most
inline bool IsWordAligned(const void* array) {
  return reinterpret_cast<uintptr_t>(array) % kWordBytes == 0;
}
// Whether rows of `row_bytes` in all of the arrays, null ones aside, are made of 16-byte words.
inline bool HasWholeWords(uint64_t row_bytes, std::initializer_list<const void*> arrays) {
  return row_bytes % kWordBytes == 0 && std::all_of(arrays.begin(), arrays.end(), &IsWordAligned);
}

// Kernels take null for an array that a call does not have.
template <typename T>
constexpr T* DataOrNull(std::span<T> array) {
  return array.empty() ? nullptr : array.data();
}

}  // namespace jax_ep::gpu
