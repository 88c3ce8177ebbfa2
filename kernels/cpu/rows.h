// Arithmetic on rows: conversions between element types and f32, sums, dot products. Results are
// the same bits on every machine: fixed lane order, no contraction to FMA (see CMakeLists.txt), no
// dependence on the vector width that the machine has. No exchange, no layout.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/layout.h"

namespace jax_ep {

// From this size on, an array that is written once and read later by others is written past the
// caches: a cached store first reads the line that it replaces. Smaller ones are still in the cache
// when the next operation reads them. (docs/performance_cpu.md)
inline constexpr uint64_t kStreamFromBytes = uint64_t{8} << 20;

// memcpy past the caches. StreamFence must follow, on the same thread, before anything that tells
// others that the bytes are there.
void StreamCopy(std::byte* dst, const std::byte* src, uint64_t num_bytes);
void StreamFence();

// Starts to fetch bytes that will be read soon: rows are too short for the hardware to guess the
// next one. A hint; any address will do.
inline void PrefetchBytes(const std::byte* bytes, uint64_t num_bytes) {
  constexpr uint64_t kLineBytes = 64;
  for (uint64_t i = 0; i < num_bytes; i += kLineBytes) {
    __builtin_prefetch(bytes + i, /*rw=*/0, /*locality: into L2=*/2);
  }
}

// All pointers are aligned to their element; `num_elems` may be anything. bf16 and f16 round to
// nearest, ties to even. Inputs and outputs do not overlap unless said.

// acc = weight * row
void LoadScaled(ElemType type, float* acc, const std::byte* row, float weight, uint64_t num_elems);
// acc += weight * row
void AddScaled(ElemType type, float* acc, const std::byte* row, float weight, uint64_t num_elems);
// acc += other
void AddFloats(float* acc, const float* other, uint64_t num_elems);
// acc = float(type(acc)): what is left of a partial after it travelled as `type`
void RoundFloats(ElemType type, float* acc, uint64_t num_elems);
// row = type(acc)
void StoreRounded(ElemType type, std::byte* row, const float* acc, uint64_t num_elems);
// dst = type(weight * src)
void ScaleRow(ElemType type, std::byte* dst, const std::byte* src, float weight,
              uint64_t num_elems);
// Sum of a * b in f32: lanes by index modulo 256, which then join by halves (docs/semantics.md).
float DotRows(ElemType type, const std::byte* a, const std::byte* b, uint64_t num_elems);

}  // namespace jax_ep
